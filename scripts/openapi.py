#!/usr/bin/env python3
"""Writes clients/openapi.json, the description that clients are made from; `--check` says whether it is true."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import cast

from llm4agents.api.app import create_app
from llm4agents.api.context import Context
from llm4agents.api.schema.document import document

FILE = Path(__file__).resolve().parents[1] / "clients" / "openapi.json"


def text() -> str:
    # Routes alone are looked at: no server, no state.
    described = document(create_app(cast(Context, None)))
    described["info"]["version"] = "1"  # of the API: the file does not change with every release
    return json.dumps(described, indent=1, ensure_ascii=False, sort_keys=False) + "\n"


def main() -> int:
    if "--check" in sys.argv[1:]:
        same = FILE.exists() and FILE.read_text() == text()
        print("true" if same else f"{FILE.name} is not what the server says: run scripts/openapi.py")
        return 0 if same else 1
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(text())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
