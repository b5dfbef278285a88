"""/v1/secrets: names and versions can be read, values only written. Not here: who uses them (`…/network`).

The body of a PUT is read here and by nothing else: a framework's validation errors tell what they were given.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from llm4agents import limits
from llm4agents.api import context
from llm4agents.api.answers import Json, check_json
from llm4agents.errors import InvalidRequestError

router = APIRouter(prefix="/v1/secrets")

_BODY_BYTES_MAX = 6 * limits.SECRET_BYTES_MAX + 4_096  # every character of a value may be written as \uXXXX
_HINT = 'the body is {"value": "…"}, or {"value": {"access_key_id": "…", "secret_access_key": "…"}}'
_TEXT = {"type": "string", "minLength": 1, "format": "password", "writeOnly": True}
_SCHEMA: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["value"],
                    "additionalProperties": False,
                    "properties": {
                        "value": {
                            "oneOf": [
                                _TEXT,
                                {
                                    "type": "object",
                                    "required": ["access_key_id", "secret_access_key"],
                                    "additionalProperties": False,
                                    "properties": {
                                        "access_key_id": _TEXT,
                                        "secret_access_key": _TEXT,
                                        "session_token": {**_TEXT, "type": ["string", "null"]},
                                    },
                                },
                            ]
                        }
                    },
                }
            }
        },
    }
}


@router.get("")
async def listed(request: Request) -> Response:
    return Json({"data": context.of(request).engine.secrets.list(context.principal(request).project)})


@router.put("/{name}", openapi_extra=_SCHEMA)
async def put(name: str, request: Request) -> Response:
    return Json(
        await context.of(request).engine.secrets.set(
            name, await _value(request), context.principal(request).project
        )
    )


@router.delete("/{name}")
async def remove(name: str, request: Request) -> Response:
    return Json(await context.of(request).engine.secrets.remove(name, context.principal(request).project))


async def _value(request: Request) -> object:
    if "content-type" in request.headers:
        check_json(request)
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > _BODY_BYTES_MAX:
            raise InvalidRequestError(f"a secret's value has at most {limits.SECRET_BYTES_MAX} bytes")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    # `from None` and no word of the body: what comes here is a secret, also where it is malformed.
    if not isinstance(body, dict) or set(body) != {"value"}:
        raise InvalidRequestError("the request is not a secret's value", hint=_HINT) from None
    return body["value"]
