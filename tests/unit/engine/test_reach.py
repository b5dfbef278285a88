"""What callers who do not run the host may name of what is its own: nothing, unless its operator lists it."""

from __future__ import annotations

import asyncio
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from llm4agents import config, limits
from llm4agents.barrier import addresses
from llm4agents.engine import webhooks
from llm4agents.engine.reach import Reach
from llm4agents.errors import ForbiddenError, InvalidRequestError
from llm4agents.store.jobs import RunRow
from tests.unit.api.served import serving

OWN = frozenset({ip_address("203.0.113.7")})
MINE = "sbx_" + "m" * 20


def reach(*listed: str) -> Reach:
    return Reach(listed, lambda: OWN)


@pytest.mark.parametrize(
    "rule",
    [
        "allow 127.0.0.1:22",
        "allow http 169.254.169.254/latest/*",
        "allow 10.0.0.0/8",
        "allow 192.168.1.0/24",
        "allow 100.100.100.200",
        "allow [::1]:80",
        "allow [::ffff:127.0.0.1]:80",
        "allow [64:ff9b::7f00:1]:80",
        "allow [fd00:ec2::254]",
        "allow fc00::/7",
        "allow 203.0.113.7",  # this host's own
    ],
)
def test_what_is_the_host_s_own_is_opened_by_no_key(rule: str) -> None:
    for network in ([rule], {"profile": "public", "rules": ["allow example.com", rule]}):
        with pytest.raises(ForbiddenError, match="which a key of a project"):
            reach().check(network)
    reach().check(["deny 127.0.0.0/8", "deny 10.0.0.1"])


@pytest.mark.parametrize(
    "network", ["public", "none", ["allow *"], ["allow 0.0.0.0/0"], ["allow 8.8.8.0/24", "allow 203.0.113.8"]]
)
def test_ordinary_addresses_are_anybody_s(network: Any) -> None:
    reach().check(network)


def test_a_class_that_is_opened_is_one_that_was_named() -> None:
    """`beyond` says of a network what `opens` does of the addresses in it."""
    for text in (
        "127.0.0.1",
        "10.0.0.0/8",
        "8.0.0.0/6",
        "169.254.0.0/15",
        "169.254.0.0/24",
        "64:ff9b::/96",
        "2002::/16",
    ):
        net = ip_network(text)
        here = [
            net.network_address,
            net.network_address + min(3, net.num_addresses - 1),
            ip_address("10.0.0.1"),
        ]
        opened = {
            kind
            for one in here
            if (kind := addresses.classify(one)) is not addresses.Kind.PUBLIC
            and addresses.opens(net, one, kind)
        }
        assert bool(opened) == (addresses.beyond(net) is not None), text


def test_the_operator_lists_what_projects_may_name() -> None:
    found = reach("10.1.0.0/16", "127.0.0.1")
    found.check(["allow 10.1.2.0/24", "allow 127.0.0.1:5432"])
    assert found.refused(ip_address("10.1.2.3")) is None
    for rule in ("allow 10.0.0.0/8", "allow 127.0.0.2"):
        with pytest.raises(ForbiddenError):
            found.check([rule])
    settings = config.load({"LLM4AGENTS_NETWORK_PRIVATE": "10.1.0.0/16, ::1"})
    assert settings.network_private == ("10.1.0.0/16", "::1")
    with pytest.raises(InvalidRequestError, match="neither an address nor a network"):
        config.load({"LLM4AGENTS_NETWORK_PRIVATE": "localhost"})


def test_a_webhook_goes_to_ordinary_addresses_also_by_name() -> None:
    for url in (
        "http://127.0.0.1:1/",
        "http://10.0.0.1/",
        "http://[::ffff:10.0.0.1]/",
        "http://203.0.113.7/",
    ):
        with pytest.raises(InvalidRequestError, match="webhooks of a project do not go to"):
            webhooks.check_url(url, reach().refused)
    webhooks.check_url("http://8.8.8.8/", reach().refused)
    with pytest.raises(webhooks.WebhookError, match="loopback"):
        asyncio.run(webhooks.deliver("http://localhost:1/", {"id": "x"}, "s", 1, reach().refused))


def test_through_the_api_it_is_who_asks_that_counts(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        project = served.project("team")
        served.sandbox(MINE, project, "paused", paused_at=0.0)
        key, operator = served.key(project), served.key(project, scopes=["node"])
        rules = ["allow 127.0.0.1:22"]
        recipe = {"from": {"template": "base"}, "network": rules, "steps": [{"run": "true"}]}
        for method, path, body in (
            ("POST", "/v1/sandboxes", {"template": "base", "network": rules}),
            ("PUT", f"/v1/sandboxes/{MINE}/network", {"network": rules}),
            ("POST", "/v1/templates", {"name": "mine", "recipe": recipe}),
        ):
            refused = served.ask(method, path, key, json=body)
            assert (refused.status_code, refused.json()["code"]) == (403, "forbidden"), path
            assert "127.0.0.1" in refused.json()["detail"]
            assert served.ask(method, path, operator, json=body).status_code != 403, path
        hook = {"command": "true", "webhook": "http://127.0.0.1:1/"}
        assert served.ask("POST", f"/v1/sandboxes/{MINE}/jobs", key, json=hook).status_code == 400
        made = served.ask("POST", f"/v1/sandboxes/{MINE}/jobs", operator, json=hook)
        assert made.status_code == 201 and "guarded" not in made.json()


def test_a_webhook_that_fails_oddly_is_tried_again_later_and_not_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def odd(*_: Any) -> int:
        raise RuntimeError("odd")

    monkeypatch.setattr(webhooks, "deliver", odd)
    with serving(tmp_path) as served:
        served.sandbox(MINE, "default", "paused", paused_at=0.0)
        jobs = served.context.engine.jobs
        spec = {"command": "true", "webhook": "http://127.0.0.1:1/"}

        async def told() -> Any:
            job, _ = jobs.add(MINE, spec, at=None, every_s=None)
            run = RunRow(job.id, 1, due_at=0.0, state="done", told={"tries": 0, "next_at": 0.0, "last": []})
            jobs._store.begin(job, run, keep=9)
            jobs._tells[run.id] = run
            await jobs._tell(run)
            return run.told

        found = served.wait(told())
        assert found["tries"] == 1 and found["last"][0]["error"] == "odd"
        assert found["next_at"] > found["last"][0]["at"] + 1


def test_jobs_that_are_over_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "JOBS_ENDED_KEPT", 2)
    with serving(tmp_path) as served:
        served.sandbox(MINE, "default", "paused", paused_at=0.0)
        jobs = served.context.engine.jobs

        async def made() -> list[str]:
            for at in range(5):
                job, _ = jobs.add(MINE, {"command": "true"}, at=None, every_s=None)
                run = RunRow(job.id, 1, due_at=0.0, state="done")
                jobs._store.begin(job, run, keep=9)
                jobs._store.change(job, state="ended", ended_at=float(at))
            jobs.add(MINE, {"command": "last"}, at=None, every_s=None)
            return [str(job.ended_at) for job in jobs.find(MINE, (), 99)]

        assert sorted(served.wait(made())) == ["3.0", "4.0", "None"]
        assert len(served.context.engine.jobs._store.open_runs()) == 0


def test_odd_words_in_a_request_are_the_request_s_fault(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        key = served.key()
        many = "&".join(f"metadata.k{at}=1" for at in range(1_500))
        for query in (many, "metadata.%00=1", "metadata.a=%00"):
            assert served.ask("GET", f"/v1/sandboxes?{query}", key).status_code == 400
        half = (
            b'{"name": "x", "recipe": {"from": {"template": "base"}, "steps": [{"env": {"A": "\\ud800"}}]}}'
        )
        headers = {"content-type": "application/json"}
        assert served.ask("POST", "/v1/templates", key, content=half, headers=headers).status_code == 400
