"""The tools over stdin and stdout, until the client goes away. Not here: the tools (`llm4agents.tools`)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from llm4agents.cli import output
from llm4agents.errors import LLM4AgentsError
from llm4agents.tools.boxes import Boxes
from llm4agents.tools.server import make


def serve(boxes: Boxes, host_root: Path | None) -> NoReturn:
    """Until the client closes stdin, or SIGTERM; then `boxes` is closed and the process is over."""
    asyncio.run(_serve(boxes, host_root))
    raise AssertionError("not reached")


async def _serve(boxes: Boxes, host_root: Path | None) -> NoReturn:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    serving = asyncio.ensure_future(make(lambda _: boxes, host_root).run_stdio_async())
    stopping = asyncio.ensure_future(stop.wait())
    code = 0
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done() and (error := serving.exception()) is not None:
            code = output.report(error) if isinstance(error, LLM4AgentsError) else output.UNKNOWN
            output.say(f"error: {type(error).__name__}: {error}")
        await boxes.close()
    except LLM4AgentsError as error:
        code = output.report(error)
    finally:
        # Not by an orderly end: a thread waits on a stdin that the client may have left open.
        sys.stderr.flush()
        os._exit(code)
