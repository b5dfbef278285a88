"""Restores one clone, says its record, and waits to be killed: the server that dies in the conformance suite.

python -m tests.contract.spawner DRIVER HOME RUN_DIR OVERLAY DEADLINE
"""

import asyncio
import json
import sys
from pathlib import Path

from llm4agents.vmm.base import Placement
from llm4agents.vmm.snapshot import load

from .lab import DRIVERS, Frozen, wake


async def main() -> None:
    name, home, run_dir, overlay, deadline = sys.argv[1], *map(Path, sys.argv[2:5]), float(sys.argv[5])
    snapshot = load(home / "snapshot")
    disks = Frozen(name, home, snapshot.spec).disks(overlay)
    machine = await DRIVERS[name]().restore(snapshot, Placement(run_dir.name, run_dir, deadline), disks)
    await machine.resume()
    await wake(machine)
    sys.stdout.write(json.dumps(machine.record.to_json()) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


asyncio.run(main())
