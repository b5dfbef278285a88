"""`python -m llm4agents` is the command line."""

from __future__ import annotations

import sys

from llm4agents.cli import main

if __name__ == "__main__":
    sys.exit(main())
