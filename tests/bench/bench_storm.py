"""The server killed with -9 at random moments under random operations: what is orphaned, lost or doubled."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from llm4agents.config import settings
from tests.bench.common import finish
from tests.reliability.storm import Storm, report
from tests.support import Node, sdk_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="l4a-storm-") as home:
        node = Node(Path(home), settings().cache)
        with sdk_of(node):
            storm = Storm(node, kills=options.kills, clients=options.clients, seed=options.seed)
            outcome = asyncio.run(storm.run())
            for kind in ("lost", "doubled", "broken", "orphans"):
                for line in getattr(outcome, kind)[:20]:
                    print(f"{kind}: {line}", file=sys.stderr)
            node.http.post("/v1/server/stop", json={"keep": False})
        node.http.close()
    finish(report(outcome))


if __name__ == "__main__":
    main()
