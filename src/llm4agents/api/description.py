"""GET /openapi.json: what this server understands (`api.schema`). Needs no key: it is the same for everybody."""

from __future__ import annotations

import asyncio
import hashlib

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class Description:
    """An ASGI application; one per server. Built once, in a thread, when it is first asked for; then it is bytes."""

    def __init__(self) -> None:
        self._built: asyncio.Task[tuple[bytes, str]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if self._built is None:
            self._built = asyncio.create_task(asyncio.to_thread(_build, request.app))
        text, tag = await asyncio.shield(self._built)
        headers = {"etag": tag, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            await Response(status_code=304, headers=headers)(scope, receive, send)
            return
        await Response(text, media_type="application/json", headers=headers)(scope, receive, send)


def _build(app: FastAPI) -> tuple[bytes, str]:
    from llm4agents.api.schema import document  # some hundred models, which no other call needs

    text = document.text_of(document.document(app))
    return text, f'"{hashlib.sha256(text).hexdigest()[:32]}"'
