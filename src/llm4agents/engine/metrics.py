"""Counts and times of this server for Prometheus, and the figures of `top`.

Counting is plain Python, so that a server that nobody scrapes need not import prometheus-client; the text is made
when it is asked for. Labels are bounded: reasons are sorted into kinds, calls are named by their route, and
sandboxes have figures of their own only while they live.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from llm4agents.store import SandboxRow, Store
from llm4agents.store.store import TERMINAL, Stamp

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BUCKETS_S: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 15.0, 60.0)
SANDBOXES_MAX: Final = 1_000
"""Sandboxes with figures of their own in one answer; the longest alive."""
_ACTS: Final = {
    "creating": ("create", "running"),
    "pausing": ("pause", "paused"),
    "resuming": ("resume", "running"),
}
_KINDS: Final = (
    ("idle_timeout", "idle_timeout"),
    ("life_end", "life_end"),
    ("deadline", "deadline"),
    ("killed by request", "request"),
    ("server stopped", "server_stopped"),
    ("cancelled", "cancelled"),
    ("create failed", "create_failed"),
    ("protocol error", "protocol_error"),
    ("channel lost", "channel_lost"),
    ("the machine", "machine_ended"),
    ("its machine is gone", "machine_lost"),
    ("could not be taken over", "not_adopted"),
    ("its server died", "server_died"),
)


def kind_of(reason: str | None) -> str:
    """The kind of an end, one of a dozen."""
    return next((kind for start, kind in _KINDS if (reason or "").startswith(start)), "other")


@dataclass(slots=True)
class Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        names = [*(str(bound) for bound in BUCKETS_S), "+Inf"]
        return [(name, sum(self.counts[: at + 1])) for at, name in enumerate(names)]


@dataclass(frozen=True, slots=True)
class Gauge:
    """One figure as it is now."""

    name: str
    help: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


class Metrics:
    """Counts since this server started. `gauges` give what is only known when it is asked for."""

    def __init__(self, store: Store) -> None:
        self.acts: dict[str, Histogram] = {name: Histogram() for name, _ in _ACTS.values()}
        self.ends: Counter[tuple[str, str]] = Counter()
        self.failed_acts: Counter[str] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.call_s: dict[str, Histogram] = {}
        self.gauges: list[Callable[[], Iterable[Gauge]]] = []
        self._began: dict[str, Stamp] = {}
        store.on_transition.append(self._changed)

    def call(self, route: str, status: int, seconds: float) -> None:
        """A request has been answered. `route` is a pattern of ours, never what a client sent."""
        self.calls[route, str(status)] += 1
        self.call_s.setdefault(route, Histogram()).observe(seconds)

    def _changed(self, row: SandboxRow, was: str | None, to: str, reason: str | None, at: Stamp) -> None:
        act, done = _ACTS.get(was or "", ("", ""))
        began = self._began.pop(row.id, None)
        if act and to == done:
            if began is not None and began.host_boot_id == at.host_boot_id:
                self.acts[act].observe((at.monotonic_ns - began.monotonic_ns) / 1e9)
        elif act:
            self.failed_acts[act] += 1
        if to in _ACTS:
            self._began[row.id] = at
        if to in TERMINAL:
            self.ends[to, kind_of(reason)] += 1

    def text(self, gauges: Iterable[Gauge]) -> bytes:
        """Prometheus' text format; `gauges` besides those that are registered."""
        from prometheus_client import CollectorRegistry, generate_latest

        known = [*gauges, *(gauge for source in self.gauges for gauge in source())]

        class Once:
            def collect(self) -> Iterator[Metric]:
                yield from families

        families = list(self._families(known))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(Once())
        return generate_latest(registry)

    def _families(self, gauges: list[Gauge]) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for act, seen in self.acts.items():
            family = HistogramMetricFamily(
                f"llm4agents_{act}_seconds", f"Seconds from {act} asked for to {act} done."
            )
            family.add_metric([], seen.buckets(), seen.total_s)
            yield family
        failed = CounterMetricFamily(
            "llm4agents_failed_acts", "Creates, pauses and resumes that failed.", labels=["act"]
        )
        for act in self.acts:
            failed.add_metric([act], self.failed_acts[act])
        yield failed
        ends = CounterMetricFamily(
            "llm4agents_ends", "Sandboxes that ended, by state and kind of reason.", labels=["state", "kind"]
        )
        for labels, count in self.ends.items():
            ends.add_metric(list(labels), count)
        yield ends
        calls = CounterMetricFamily(
            "llm4agents_calls", "Requests, by route and status.", labels=["route", "status"]
        )
        for labels, count in self.calls.items():
            calls.add_metric(list(labels), count)
        yield calls
        times = HistogramMetricFamily("llm4agents_call_seconds", "Seconds of requests.", labels=["route"])
        for route, seen in self.call_s.items():
            times.add_metric([route], seen.buckets(), seen.total_s)
        yield times
        by_name: dict[str, GaugeMetricFamily] = {}
        for gauge in gauges:
            family_ = by_name.get(gauge.name)
            if family_ is None:
                family_ = by_name[gauge.name] = GaugeMetricFamily(
                    f"llm4agents_{gauge.name}", gauge.help, labels=list(gauge.labels)
                )
            family_.add_metric(list(gauge.labels.values()), gauge.value)
        yield from by_name.values()


def server_rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def of_sandboxes(rows: list[dict[str, Any]]) -> Iterator[Gauge]:
    """The figures of sandboxes that live, from the rows of `top`."""
    for row in rows[:SANDBOXES_MAX]:
        labels = {"sandbox": row["id"], "template": row["template"]}
        if row["cpu_s"] is not None:
            yield Gauge("sandbox_cpu_seconds", "CPU time of its VMM.", row["cpu_s"], labels)
            yield Gauge("sandbox_rss_bytes", "Resident memory of its VMM.", row["rss_bytes"], labels)
            yield Gauge("sandbox_pss_bytes", "Its share of memory.", row["pss_bytes"], labels)
        yield Gauge("sandbox_calls_running", "Calls under way.", row["calls"], labels)
