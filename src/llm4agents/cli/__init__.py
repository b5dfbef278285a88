"""The command line, thin over the SDK. Nothing is decided here that the SDK could decide.

Start-up must stay under 150 ms: `--version` imports nothing, the command table imports typer only, and
each command imports the SDK (and rich, when there is a terminal to draw on) when it runs.

Exit codes: 0 done; 1 the code failed (or doctor found this host unfit); 2 the command line is wrong;
3 nothing was started; 4 it may have run in part; 130 interrupted. `exec` passes on the command's own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def _name() -> str:
    name = Path(sys.argv[0]).name
    return name if name in ("llm4agents", "l4a") else "llm4agents"


def _open_closed() -> None:
    """A stream that whoever started us has closed (`>&-`) is None: what goes there goes nowhere."""
    for stream, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, stream) is None:
            setattr(sys, stream, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 (until the end)


def main() -> int:
    """Runs the command of `sys.argv`; what the console scripts call. Returns the exit code."""
    _open_closed()
    if sys.argv[1:] in (["--version"], ["-V"]):
        from llm4agents import __version__

        print(f"llm4agents {__version__}")
        return 0
    from llm4agents.errors import LLM4AgentsError

    try:
        from llm4agents.cli.app import build

        completing = any(name.endswith("_COMPLETE") for name in os.environ)
        build(None if completing else next(iter(sys.argv[1:]), ""))(prog_name=_name())
    except LLM4AgentsError as error:
        from llm4agents.cli.output import report

        return report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0
