"""What a node tells of itself and of its sandboxes: usage, events, logs, metrics."""

from __future__ import annotations

import importlib.util
import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.support import Node, eventually, lines

pytestmark = pytest.mark.vm

Make = Callable[..., Node]
NS = 10**9


def life_ns(node: Node, sandbox: str, state: str = "running") -> int:
    """How long it was in `state`, from its events."""
    total = 0
    events = node.call("GET", f"/v1/sandboxes/{sandbox}/events")["data"]
    for event, following in itertools.pairwise(events):
        if event["to_state"] == state:
            total += following["monotonic_ns"] - event["monotonic_ns"]
    return total


def rows(node: Node, sandbox: str) -> list[dict[str, Any]]:
    return list(node.call("GET", "/v1/usage", params={"sandbox": sandbox})["data"])


def used_ns(node: Node, sandbox: str) -> int:
    return sum(row["duration_ns"] for row in rows(node, sandbox) if row["state"] == "running")


def test_usage_is_the_life_to_the_nanosecond_also_over_a_killed_server(node: Node) -> None:
    first, second = node.create(), node.create()
    node.exec(first, "head -c 3000000 /dev/urandom > file; sync")
    node.call("DELETE", f"/v1/sandboxes/{first}")
    assert used_ns(node, first) == life_ns(node, first) > 0
    (row,) = rows(node, first)
    assert row["key"] == f"{first}:{row['boot_id']}:1"
    assert (row["vcpus"], row["memory_mib"]) == (1, 1024)
    assert row["disk_bytes"] > 3_000_000
    node.kill9()
    node.start()
    node.call("DELETE", f"/v1/sandboxes/{second}")
    assert used_ns(node, second) == life_ns(node, second)


def test_a_machine_that_ended_while_no_server_lived_is_charged_to_its_end(node: Node) -> None:
    sandbox = node.create()
    vmm = node.vmm(sandbox)
    began = node.call("GET", f"/v1/sandboxes/{sandbox}/events")["data"][-1]["wall_ns"]
    node.kill9()
    os.kill(vmm, signal.SIGKILL)
    record = node.run / "vm" / sandbox / "exit"
    ended = eventually(lambda: record.exists() and record.stat().st_mtime_ns)
    node.start()
    assert node.get(sandbox)["state"] == "failed"
    assert abs(used_ns(node, sandbox) - (ended - began)) < NS // 100
    assert used_ns(node, sandbox) < life_ns(node, sandbox)


def test_events_are_followed_from_a_cursor_and_over_a_killed_server(node: Node) -> None:
    sandbox = node.create()
    page = node.call("GET", "/v1/events", params={"limit": 1})
    assert [(e["sandbox"], e["from"], e["to"]) for e in page["data"]] == [(sandbox, None, "creating")]
    after = page["next"]
    with (
        node.connect() as client,
        client.stream("GET", "/v1/events", params={"after": after, "follow": True}) as answer,
    ):
        told = lines(answer)
        assert next(told) == {"type": "cursor", "id": after}
        assert next(told)["to"] == "running"
        node.call("DELETE", f"/v1/sandboxes/{sandbox}")
        ended = next(told)
        assert (ended["to"], ended["reason"]) == ("killed", "killed by request")
        other = node.create()
        assert next(told)["sandbox"] == other
        after = next(told)["id"]
        node.kill9()
        with pytest.raises(httpx.TransportError):
            next(told)
    node.start()
    node.call("DELETE", f"/v1/sandboxes/{other}")
    page = node.call("GET", "/v1/events", params={"after": after})
    assert [(e["sandbox"], e["to"]) for e in page["data"]] == [(other, "killed")]
    assert page["next"] is None


def test_a_follower_ends_when_the_server_stops(node: Node) -> None:
    with node.connect() as client, client.stream("GET", "/v1/events", params={"follow": True}) as answer:
        told = lines(answer)
        assert next(told)["type"] == "cursor"
        sandbox = node.create()
        assert next(told)["sandbox"] == sandbox
        node.call("POST", "/v1/server/stop", json={"keep": False})
        assert [event["to"] for event in told] == ["running", "killed"]
    assert node.process is not None
    node.process.wait(10)


def test_the_log_of_a_sandbox_outlives_it(node: Node) -> None:
    sandbox, other = node.create(timeout_s=60), node.create()
    with (
        node.connect() as client,
        client.stream("GET", f"/v1/sandboxes/{sandbox}/logs", params={"follow": True}) as answer,
    ):
        told = lines(answer)
        assert [next(told)["to"] for _ in range(2)] == ["creating", "running"]
        node.exec(sandbox, "echo hello from the guest > /dev/console", user="root")
        assert "hello from the guest" in next(line["text"] for line in told if line["type"] == "console")
        os.kill(node.vmm(sandbox), signal.SIGKILL)
        said = list(told)
    (end,) = [line for line in said if line["type"] == "log" and line["event"] == "state"]
    assert end["to"] == "failed" and "signal 9" in end["reason"]
    kept = node.call("GET", f"/v1/sandboxes/{sandbox}/logs")
    assert "hello from the guest" in next(line["text"] for line in kept["data"] if line["event"] == "console")
    assert kept["console"] == ""
    alive = node.call("GET", f"/v1/sandboxes/{other}/logs")
    assert [line["to"] for line in alive["data"]] == ["creating", "running"]
    assert node.http.get(f"/v1/sandboxes/sbx_{'0' * 20}/logs").status_code == 404


def value(text: str, series: str) -> float:
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{series} "))


def test_metrics_for_prometheus(node: Node) -> None:
    first, second = node.create(), node.create()
    node.exec(first, "true")
    node.call("DELETE", f"/v1/sandboxes/{second}")
    text = node.http.get("/metrics").text
    assert value(text, 'llm4agents_sandboxes{state="running"}') == 1
    assert value(text, "llm4agents_create_seconds_count") == 2
    assert 0 < value(text, "llm4agents_create_seconds_sum") < 60
    assert value(text, 'llm4agents_ends_total{kind="request",state="killed"}') == 1
    route = "POST /v1/sandboxes/{sandbox}/exec"
    assert value(text, f'llm4agents_calls_total{{route="{route}",status="200"}}') == 1
    assert value(text, f'llm4agents_sandbox_cpu_seconds{{sandbox="{first}",template="base"}}') > 0
    held = value(text, "llm4agents_admission_held_bytes")
    assert 0 < held < value(text, "llm4agents_admission_total_bytes")
    assert value(text, "llm4agents_server_rss_bytes") > 1e7
    assert second not in text, "only what lives has figures of its own"
    node.http.get("/v1/nonsense")
    assert 'route="GET unknown",status="404"' in node.http.get("/metrics").text
    top = node.call("GET", "/v1/top")
    (row,) = top["data"]
    assert (row["id"], row["state"], row["calls"]) == (first, "running", 0)
    assert row["pss_bytes"] > 1e6
    assert top["node"]["sandboxes"]["running"] == 1


def test_traces_that_cannot_be_sent_are_refused_at_the_start(nodes: Make) -> None:
    if importlib.util.find_spec("opentelemetry.sdk") is not None:
        pytest.skip("the packages are there")
    node = nodes(LLM4AGENTS_OTEL="1")
    assert node.spawn().wait(30) == 1
    assert "llm4agents[otel]" in node.log()
