"""What leaves through the gate: the request's id is put on it, and what became of the call is read off it."""

from __future__ import annotations

import json
from typing import Any

from starlette.types import Message, Send

_PROBLEM = b"application/problem+json"
_NDJSON = b"application/x-ndjson"
_ERROR_LINE = b'{"type":"error"'
_PROBLEM_BYTES_MAX = 262_144


class Answer:
    """A `send`. `status` 499: there was none, the client went away before."""

    def __init__(self, send: Send, request: str) -> None:
        self._send, self._request = send, request.encode()
        self.status, self.begun, self.complete = 499, False, False
        self.code: str | None = None
        self.outcome: str | None = None
        self.media_type = ""
        self._keep = self._size = 0
        self._problem = self._lines = self._large = False
        self._pieces: list[bytes] | None = None

    def keep(self, bytes_max: int) -> None:
        """Remember the body (of one in lines the last line), if it is not larger."""
        self._keep, self._pieces = bytes_max, []

    @property
    def kept(self) -> bytes | None:
        """None: it is too large."""
        return None if self._large or self._pieces is None else b"".join(self._pieces)

    async def __call__(self, message: Message) -> None:
        kind = message["type"]
        if kind in ("http.response.start", "websocket.http.response.start"):
            self._start(message)
            headers = [*message.get("headers", ()), (b"x-request-id", self._request)]
            message = {**message, "headers": headers}
        elif kind in ("http.response.body", "websocket.http.response.body"):
            self._body(message)
        elif kind == "websocket.accept":
            self.begun, self.status = True, 101
            headers = [*message.get("headers", ()), (b"x-request-id", self._request)]
            message = {**message, "headers": headers}
        await self._send(message)
        if kind == "http.response.body" and not message.get("more_body"):
            self.complete = True

    def _start(self, message: Message) -> None:
        self.begun, self.status = True, message["status"]
        media = next(
            (value for name, value in message.get("headers", ()) if name.lower() == b"content-type"), b""
        )
        self.media_type = media.decode("latin-1")
        self._problem = self.status >= 400 and media.startswith(_PROBLEM)
        self._lines = media.startswith(_NDJSON)

    def _body(self, message: Message) -> None:
        body = message.get("body", b"")
        if not body:
            return
        if self._problem or (self._lines and body.startswith(_ERROR_LINE)):
            self._read(body)
        if self._pieces is not None:
            if self._lines:
                self._pieces.clear()
                self._size = 0
            self._size += len(body)
            self._large = self._size > self._keep
            if self._large:
                self._pieces.clear()
            else:
                self._pieces.append(bytes(body))

    def _read(self, body: bytes) -> None:
        if len(body) > _PROBLEM_BYTES_MAX:
            return
        try:
            said: Any = json.loads(body)
        except ValueError:
            return
        if isinstance(said, dict):
            self.code, self.outcome = str(said.get("code")), str(said.get("outcome"))
