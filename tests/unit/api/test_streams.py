"""Answers that come as they are made, without a server."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncGenerator
from typing import Any

from llm4agents.api.answers import NDJSON, Stream


def test_a_failure_nobody_foresaw_is_a_last_line_and_no_cut() -> None:
    async def items(error: Exception) -> AsyncGenerator[Any, None]:
        yield {"type": "step"}
        raise error

    async def main(error: Exception) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.Event().wait()

        await Stream(items(error), lines=True, media_type=NDJSON)({"type": "http"}, receive, send)
        return sent

    def told(error: Exception) -> dict[str, Any]:
        head, *bodies = asyncio.run(main(error))
        assert head["status"] == 200 and bodies[-1]["more_body"] is False
        first, last = (json.loads(line) for line in b"".join(body["body"] for body in bodies).splitlines())
        assert first == {"type": "step"} and last["type"] == "error"
        return dict(last)

    last = told(KeyError("not for the client"))
    assert (last["code"], last["outcome"]) == ("unknown_outcome", "unknown")
    assert "KeyError" in last["detail"] and "not for the client" not in json.dumps(last)
    assert told(OSError(errno.ENOSPC, "full"))["code"] == "capacity"
