"""`Idempotency-Key`: what makes two requests the same, and how an answer is kept and sent again.

The whole body is read first (it has the bound of all bodies). Of an answer that comes in lines the last one is kept:
it is the one that says how it ended.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llm4agents import limits
from llm4agents.api.access.answer import Answer
from llm4agents.engine.repeats import Repeats
from llm4agents.errors import InvalidRequestError

HEADER = b"idempotency-key"
_KEY = re.compile(r"[A-Za-z0-9_-]{1,255}")
NOT_KEPT = frozenset(
    {
        "/v1/keys",
        "/v1/invites",
        "/v1/register",
        "/v1/sandboxes/{sandbox}/traffic",
        "/v1/sandboxes/{sandbox}/traffic/urls",
    }
)
"""Their answers open something by themselves: they are in no store."""
UNDONE = frozenset({"/v1/sandboxes"})
"""What is undone when the client goes away before it is answered."""


def key_of(scope: Scope, pattern: str) -> str | None:
    """The key of a request that has one. Raises InvalidRequestError."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    found = [value for name, value in scope["headers"] if name == HEADER]
    if not found:
        return None
    text = str(found[0].decode("latin-1"))
    if len(found) > 1 or not _KEY.fullmatch(text):
        raise InvalidRequestError("an Idempotency-Key is 1 to 255 of A-Z, a-z, 0-9, '_' and '-'")
    if pattern in NOT_KEPT:
        raise InvalidRequestError(
            f"POST {pattern} takes no Idempotency-Key: its answer has a secret, and is not kept"
        )
    return text


async def serve(
    app: ASGIApp,
    repeats: Repeats,
    project: str,
    key: str,
    pattern: str,
    scope: Scope,
    receive: Receive,
    answer: Answer,
) -> None:
    """Have it done, or answer as the first time.

    Raises what `Repeats.begin` does, InvalidRequestError, and ClientDisconnect before all of it was there.
    """
    body = await _whole(receive)
    kept = repeats.begin(project, key, _digest(scope, body))
    if kept is not None:
        await _replay(kept, scope, receive, answer)
        return
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    answer.keep(limits.IDEMPOTENCY_ANSWER_BYTES_MAX)
    try:
        await app(scope, again, answer)
    finally:
        if not answer.complete or answer.status == 499:
            (repeats.forget if pattern in UNDONE else repeats.leave)(project, key)
        elif answer.outcome == "not_started":
            repeats.forget(project, key)
        else:
            repeats.end(project, key, answer.status, _packed(answer))


def _packed(answer: Answer) -> bytes | None:
    if answer.kept is None:
        return None
    return json.dumps({"type": answer.media_type}).encode() + b"\n" + answer.kept


async def _replay(kept: tuple[int, bytes], scope: Scope, receive: Receive, send: Send) -> None:
    status, packed = kept
    head, _, body = packed.partition(b"\n")
    said: dict[str, Any] = json.loads(head)
    headers = {"content-type": str(said["type"]), "idempotent-replayed": "true"}
    await Response(body, status_code=status, headers=headers)(scope, receive, send)


async def _whole(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > limits.REQUEST_BODY_BYTES_MAX:
            raise InvalidRequestError(
                f"the request is larger than {limits.REQUEST_BODY_BYTES_MAX} bytes",
                hint="large data goes through files",
            )
        if not message.get("more_body"):
            return bytes(body)


def _digest(scope: Scope, body: bytes) -> bytes:
    accept = next((bytes(value) for name, value in scope["headers"] if name == b"accept"), b"")
    digest = hashlib.sha256()
    for part in (scope["method"].encode(), scope["path"].encode(), scope["query_string"], accept, body):
        digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()
