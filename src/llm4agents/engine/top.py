"""What the node and each sandbox that lives take now: the figures of `llm4agents top` and of the gauges of /metrics.

Measured on the host, from the VMMs' processes: a guest is neither asked nor held open by being looked at.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from llm4agents.engine import clock, names
from llm4agents.engine.admission import Admission
from llm4agents.engine.host import Host
from llm4agents.engine.lifecycle import STATES, TERMINAL
from llm4agents.engine.live import Live
from llm4agents.engine.metrics import SANDBOXES_MAX, Gauge, of_sandboxes, server_rss_bytes
from llm4agents.errors import LLM4AgentsError
from llm4agents.store import SandboxRow


async def sandboxes(alive: Iterable[SandboxRow], live: dict[str, Live]) -> list[dict[str, Any]]:
    """A row for each that has not ended, the oldest first, at most SANDBOXES_MAX."""
    return [row async for row in _rows(list(alive)[:SANDBOXES_MAX], live)]


async def _rows(alive: list[SandboxRow], live: dict[str, Live]) -> AsyncIterator[dict[str, Any]]:
    for row in alive:
        here = live.get(row.id)
        cpu_s: float | None = None
        rss = pss = None
        if here is not None and not here.ending:
            try:
                stats = await here.machine.stats()
                cpu_s, rss, pss = stats.cpu_ns / 1e9, stats.rss_bytes, stats.pss_bytes
            except LLM4AgentsError:
                pass  # it ends at this moment
            await asyncio.sleep(0)  # a millisecond each: others get their turn
        idle_s = None
        if here is not None:
            idle_s = 0.0 if here.busy else max(0.0, round(clock.boottime_s() - here.last_used_s, 1))
        yield {
            "id": row.id,
            "template": names.shown(row.template),
            "project": row.project,
            "state": row.state,
            "vcpus": row.vcpus,
            "memory_mib": row.memory_mib,
            "created_at": row.created_at,
            "ends_at": row.life_ends_at,
            "calls": 0 if here is None else here.busy,
            "idle_s": idle_s,
            "cpu_s": cpu_s,
            "rss_bytes": rss,
            "pss_bytes": pss,
        }


def node(
    host: Host, admission: Admission, pool: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """The host and this server."""
    return {
        "at": clock.wall_s(),
        "cores": os.cpu_count() or 1,
        "load1": os.getloadavg()[0],
        "memory_available_bytes": host.memory_available_bytes,
        "disk_free_bytes": host.disk_free_bytes,
        "server_rss_bytes": server_rss_bytes(),
        "sandboxes": {
            state: sum(row["state"] == state for row in rows) for state in STATES if state not in TERMINAL
        },
        "admission": {
            "held_bytes": admission.held_bytes,
            "total_bytes": host.memory_total_bytes - admission.policy.reserve_bytes(host),
            "waiting": admission.waiting,
        },
        "pool": pool,
        "guest_memory_mib": sum(row["memory_mib"] for row in rows if row["cpu_s"] is not None),
    }


def gauges(figures: dict[str, Any], rows: list[dict[str, Any]]) -> Iterator[Gauge]:
    """`node` and `sandboxes` for Prometheus."""
    for state, count in figures["sandboxes"].items():
        yield Gauge("sandboxes", "Sandboxes that have not ended, by state.", count, {"state": state})
    for name, words in (
        ("server_rss_bytes", "Resident memory of the server process."),
        ("memory_available_bytes", "MemAvailable of the host."),
        ("disk_free_bytes", "Free disk under the state directory."),
        ("guest_memory_mib", "Memory that running guests may touch, in MiB."),
    ):
        yield Gauge(name, words, figures[name])
    for name, words in (
        ("held_bytes", "Memory set aside for machines."),
        ("total_bytes", "Memory that may be set aside."),
        ("waiting", "Creates that wait for room."),
    ):
        yield Gauge(f"admission_{name}", words, figures["admission"][name])
    for shelf in figures["pool"]:
        labels = {"template": shelf["template"], "shape": f"{shelf['vcpus']}x{shelf['memory_mib']}"}
        yield Gauge("pool_ready", "Machines that are kept ready.", shelf["ready"], labels)
        yield Gauge("pool_wanted", "Machines that are to be kept ready.", shelf["wanted"], labels)
    yield from of_sandboxes(rows)
