"""How the processes around one sandbox are confined: its VMM and keeper, and the barrier's that serve it.

Not here: how that is read and what is promised (`vmm.jail`), HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm4agents import limits
from llm4agents.engine.live import Live
from llm4agents.errors import ConflictError, TimedOutError
from llm4agents.vmm.jail import isolation


async def of(live: Live, workers: Mapping[str, int], disk: tuple[Path, ...]) -> dict[str, Any]:
    """The report of docs/design/vmm.md. `workers`: pids of the barrier's processes, by name. `disk`: top and layers.

    Raises ConflictError when the machine has ended.
    """
    record = live.machine.record

    def look() -> dict[str, Any]:
        seen = isolation.report(record, disk)
        served = [isolation.worker(role, pid) for role, pid in workers.items()]
        processes = (*seen.processes, *(process for process in served if process is not None))
        return isolation.describe(replace(seen, processes=processes))

    try:
        # What a hostile VMM has put in the way costs a thread, and nobody waits for it longer than that.
        found = await asyncio.wait_for(asyncio.to_thread(look), limits.ISOLATION_TIMEOUT_S)
    except TimeoutError:
        raise TimedOutError(
            f"{live.row.id} could not be looked at in {limits.ISOLATION_TIMEOUT_S:g} s"
        ) from None
    if live.ending:
        raise ConflictError(f"{live.row.id} ended meanwhile")
    return {"id": live.row.id, **found}
