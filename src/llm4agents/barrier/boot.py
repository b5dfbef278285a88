"""Starts a worker: `python -I boot.py MODULE SOCKET` (or a script's path). Standard library only.

The package is made importable and nothing else is: the interceptor's interpreter has packages of its own, and the
SDK's front door (`llm4agents/__init__.py`) has no business in a worker. SOCKET names the worker to whoever looks for it
in a list of processes (`workers.running`).
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from pathlib import Path

FIRST_FREE_FD = 6
"""Below it is what a worker is given (`workers`)."""

if __name__ == "__main__":
    os.closerange(FIRST_FREE_FD, os.sysconf("SC_OPEN_MAX"))  # what whoever started the server left open
    package = types.ModuleType("llm4agents")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["llm4agents"] = package
    sys.argv[2:] = ["3"]  # where it listens: what is not a worker of `worker_side` takes it from there
    run = runpy.run_path if sys.argv[1].endswith(".py") else runpy.run_module
    run(sys.argv.pop(1), run_name="__main__")
