"""Entry point of the interpreter in the guest: `python3 -I zygote.py --socket PATH [--preload A,B] …`.

Loads the directory it lies in as a package of a name no user's module has; everything else is in `service`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

_PACKAGE = "_llm4agents_runner"


def _load() -> None:
    here = Path(__file__).resolve().parent
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, here / "__init__.py", submodule_search_locations=[str(here)]
    )
    if spec is None or spec.loader is None:
        raise SystemExit(f"zygote.py: no package at {here}")
    package = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    _load()
    importlib.import_module(f"{_PACKAGE}.service").main()
