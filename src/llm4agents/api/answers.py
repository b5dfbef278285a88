"""How answers leave: JSON, NDJSON as it comes, raw bytes; and what happens when the client goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llm4agents.api.context import CALLER, Context
from llm4agents.errors import (
    LLM4AgentsError,
    MediaTypeError,
    MethodNotAllowedError,
    UnknownOutcomeError,
    disk_full,
    to_wire,
)

log = structlog.get_logger()
T = TypeVar("T")
NDJSON = "application/x-ndjson"


def dump(body: Any) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        # A file name that is not UTF-8 has lone surrogates: as JSON escapes they travel.
        return json.dumps(body, separators=(",", ":")).encode()


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dump(content)


def problem(error: LLM4AgentsError, context: Context) -> Response:
    """Problem details; an error of the server's own says where its log is, to who may look there."""
    body, caller = to_wire(error), CALLER.get()
    if error.http_status >= 500 and (caller is None or caller.sees_all):
        body["details"] = {**body["details"], "log": str(context.settings.server_log)}
    after = error.details.get("retry_after_s")
    headers = {} if after is None else {"retry-after": str(after)}
    if isinstance(error, MethodNotAllowedError):
        headers["allow"] = ", ".join(error.details.get("allow", ()))
    return Json(body, status_code=error.http_status, headers=headers, media_type="application/problem+json")


def check_json(request: Request) -> None:
    """Raises MediaTypeError for a body that does not say that it is JSON."""
    said = request.headers.get("content-type", "")
    kind = said.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise MediaTypeError(
            f"{request.method} {request.url.path} takes JSON, and the request says "
            + (f"{said[:100]!r}" if said else "nothing of its type"),
            hint="send Content-Type: application/json",
        )


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. The body must have been read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, LLM4AgentsError):
                await task
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, LLM4AgentsError):
                await task


async def as_they_come(
    work: Callable[[], Awaitable[dict[str, Any]]], queue: asyncio.Queue[dict[str, Any]]
) -> AsyncGenerator[dict[str, Any], None]:
    """What `work` puts into the queue, as it comes, then its result. Closing it cancels the work."""
    task = asyncio.ensure_future(work())
    try:
        while not task.done():
            getter = asyncio.ensure_future(queue.get())
            await asyncio.wait({task, getter}, return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                yield getter.result()
            else:
                getter.cancel()
        while not queue.empty():
            yield queue.get_nowait()
        yield task.result()
    finally:
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, LLM4AgentsError):
                await task


def unforeseen(error: Exception) -> LLM4AgentsError:
    """What a caller is told of an error that is none of ours."""
    if isinstance(error, OSError) and (full := disk_full(error.errno)):
        return full
    return UnknownOutcomeError(f"the server failed: {type(error).__name__}", hint="its log says more")


async def _last_line(send: Send, error: LLM4AgentsError) -> None:
    line = dump({**to_wire(error), "type": "error"}) + b"\n"
    await send({"type": "http.response.body", "body": line, "more_body": True})


class Stream(Response):
    """Sends what a generator yields as it comes; the generator is closed when the client goes away.

    With `lines` each item is a line of NDJSON, and an error after the head, foreseen or not, is a last line.
    """

    def __init__(
        self,
        items: AsyncGenerator[Any, None],
        *,
        lines: bool,
        media_type: str,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.items, self.lines = items, lines
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not sending.done():
                sending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async with contextlib.aclosing(self.items) as items:
                async for item in items:
                    body = dump(item) + b"\n" if self.lines else item
                    await send({"type": "http.response.body", "body": body, "more_body": True})
        except LLM4AgentsError as error:
            if not self.lines:
                # The head is gone: a cut body is the one sign that is left, and the client counts bytes.
                log.warning("download_cut", error=str(error))
                raise
            await _last_line(send, error)
        except Exception as error:
            if not self.lines:
                raise
            log.exception("stream_failed")
            await _last_line(send, unforeseen(error))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
