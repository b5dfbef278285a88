"""`python -m llm4agents.api.restoring FILE`: a state directory made of a backup, while no server has it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from llm4agents.api.server import START_FAILED, lock
from llm4agents.config import settings
from llm4agents.engine import backup
from llm4agents.errors import LLM4AgentsError, to_wire


def main() -> int:
    """Prints what was restored as JSON; an error as the server prints one that keeps it from starting."""
    try:
        where = settings()
        held = lock(where.state, "state")
        try:
            print(json.dumps(backup.restore(where, Path(sys.argv[1]))))  # noqa: T201 (its answer)
        finally:
            os.close(held)
    except LLM4AgentsError as error:
        sys.stderr.write(START_FAILED + json.dumps(to_wire(error)) + "\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
