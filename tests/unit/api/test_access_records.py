"""What is kept of calls (audit, answers under an idempotency key), quotas, registration; and keys, kept nowhere."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from llm4agents import limits
from llm4agents.api.access.answer import Answer
from llm4agents.barrier.vault import Vault
from llm4agents.engine.audit import Entry
from llm4agents.engine.quotas import Share
from llm4agents.engine.repeats import Repeats
from llm4agents.engine.secrets import Secrets
from llm4agents.store import keys as stored_keys
from tests.unit.api.served import Served, serving

ONE = "sbx_" + "1" * 20


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("records"), REGISTRATION="1") as here:
        yield here


# -- request ids, audit -------------------------------------------------------------------------------------------


def test_a_change_and_a_refusal_are_a_row_and_a_look_is_none(served: Served) -> None:
    project = served.project("audited")
    key, reader = served.key(project), served.key(project, scopes=["read"])
    said = served.ask("PUT", "/v1/secrets/A", key, json={"value": "v"}, headers={"x-request-id": "mine-1"})
    assert said.headers["x-request-id"] == "mine-1"
    refused = served.ask("PUT", "/v1/secrets/A?token=query", reader, json={"value": "v"})
    assert served.ask("GET", "/v1/secrets", key).status_code == 200
    stranger = served.ask("GET", "/v1/secrets")
    rows = served.audit(project=project)
    assert [(row["action"], row["status"], row["actor"]) for row in rows] == [
        ("PUT /v1/secrets/{name}", 403, f"key_{reader[4:12]}"),
        ("PUT /v1/secrets/{name}", 200, f"key_{key[4:12]}"),
    ]
    assert rows[0]["code"] == "forbidden" and rows[0]["request"] == refused.headers["x-request-id"]
    assert rows[1]["request"] == "mine-1" and rows[1]["origin"] == "127.0.0.1"
    assert rows[0]["target"] == "/v1/secrets/A"
    assert served.audit(request=stranger.headers["x-request-id"])[0]["actor"] == "nobody"
    seen = served.ask("GET", "/v1/audit?limit=1", reader).json()
    assert [row["id"] for row in seen["data"]] == [rows[0]["id"]] and seen["next"] == rows[0]["id"]
    older = served.ask("GET", f"/v1/audit?before={seen['next']}", reader).json()
    assert [row["id"] for row in older["data"]] == [rows[1]["id"]] and older["next"] is None


def test_a_request_s_id_is_one_word_and_no_key(served: Served) -> None:
    key = served.key()
    for bad in ("two words", "x" * 65, key, f"x.{key}", "a;b", "l4i_" + "0" * 40, "x.l4at_" + "A" * 43):
        said = served.ask("GET", "/v1/whoami", key, headers={"x-request-id": bad})
        assert said.headers["x-request-id"].startswith("req_")


def test_guessing_does_not_fill_the_audit(served: Served) -> None:
    audit = served.context.engine.audit
    row = Entry(
        time.time(), "", "nobody", "192.0.2.1", "req_guess", "GET unknown", "/", 401, "unauthenticated", 1.0
    )

    def guess(allowed: float, times: int) -> None:
        audit._allowance = allowed
        for _ in range(times):
            audit.add_strangers(row)

    served.on_loop(audit.add_strangers, row)  # whose clock is now
    served.on_loop(guess, 3.1, 6)
    served.on_loop(guess, 10.0, 1)
    rows = served.audit(request="req_guess")
    assert len(rows) <= 7 and rows[1]["action"] == "refused" and "more calls" in rows[1]["target"]


# -- idempotency ----------------------------------------------------------------------------------------------------


def job(served: Served, key: str, once: str, command: str = "true") -> httpx.Response:
    path, headers = f"/v1/sandboxes/{ONE}/jobs", {"idempotency-key": once}
    at = time.time() + 3_600
    return served.ask("POST", path, key, headers=headers, json={"command": command, "at": round(at, -5)})


def test_a_request_that_is_sent_twice_is_done_once(served: Served) -> None:
    project = served.project("once")
    key, other = served.key(project), served.key(served.project("once more"))
    served.sandbox(ONE, project)
    first, second = job(served, key, "k1"), job(served, key, "k1")
    assert first.status_code == second.status_code == 201 and first.json() == second.json()
    assert "idempotent-replayed" not in first.headers and second.headers["idempotent-replayed"] == "true"
    assert second.headers["content-type"] == first.headers["content-type"]
    assert len(served.ask("GET", f"/v1/sandboxes/{ONE}/jobs", key).json()["data"]) == 1
    different = job(served, key, "k1", "false")
    assert (different.status_code, different.json()["code"]) == (409, "conflict")
    assert job(served, key, "k2").json()["id"] != first.json()["id"]
    # Another project's key of that name is another.
    assert job(served, other, "k1").status_code == 404
    for bad in ("", "with space", "x" * 256):
        assert job(served, key, bad).status_code == 400


def test_what_did_nothing_may_be_tried_again_with_its_key(served: Served) -> None:
    project, ident = served.project("again"), "sbx_" + "2" * 20
    key = served.key(project)
    row = served.sandbox(ident, project, "killed", ended_at=time.time())
    path, options = (
        f"/v1/sandboxes/{ident}/jobs",
        {"headers": {"idempotency-key": "k"}, "json": {"command": "true"}},
    )
    assert served.ask("POST", path, key, **options).status_code == 409
    served.on_loop(served.context.engine.store.change, row, state="paused", ended_at=None, auto_resume=False)
    assert served.ask("POST", path, key, **options).status_code == 201


def test_how_a_broken_off_request_ended_is_not_guessed(served: Served) -> None:
    """Its server died, or is at it: a repeat runs nothing."""
    store, engine = served.context.engine.store, served.context.engine
    key = served.key()
    options: dict[str, Any] = {"headers": {"idempotency-key": "broken"}, "json": {"url": "http://x"}}
    path, ident = "/v1/sandboxes/{}/jobs", "sbx_" + "3" * 20
    served.sandbox(ident, "default")
    options["json"] = {"command": "true"}
    seen: list[bytes] = []
    begin = engine.repeats.begin
    engine.repeats.begin = lambda p, k, request: seen.append(request) or begin(p, k, request)  # type: ignore[method-assign,func-returns-value]
    try:
        first = served.ask("POST", path.format(ident), key, **options)
        served.on_loop(engine.repeats.forget, "default", "broken")
        assert served.on_loop(begin, "default", "broken", seen[0]) is None
        under_way = served.ask("POST", path.format(ident), key, **options)
        assert (under_way.status_code, under_way.headers["retry-after"]) == (409, "1")
        served.on_loop(engine.repeats.leave, "default", "broken")
        unknown = served.ask("POST", path.format(ident), key, **options)
        assert unknown.status_code == 409 and "not known" in unknown.json()["detail"]
    finally:
        engine.repeats.begin = begin  # type: ignore[method-assign]
    assert first.status_code == 201
    later = served.on_loop(Repeats, store, engine.secrets)
    with pytest.raises(Exception, match="not known"):
        served.on_loop(later.begin, "default", "broken", seen[0])


def test_what_is_told_once_lies_sealed_in_the_store(served: Served, tmp_path: Path) -> None:
    engine, ident = served.context.engine, "sbx_" + "s" * 20
    project = served.project("sealed")
    key = served.key(project)
    served.sandbox(ident, project)
    wish = {"command": "true", "at": round(time.time() + 3_600, -5), "webhook": "http://192.0.2.1/hook"}

    def ask() -> httpx.Response:
        path = f"/v1/sandboxes/{ident}/jobs"
        return served.ask("POST", path, key, headers={"idempotency-key": "k"}, json=wish)

    first, again = ask(), ask()
    secret = first.json()["webhook_secret"]
    assert again.json() == first.json() and again.headers["idempotent-replayed"] == "true"
    served.on_loop(engine.store.checkpoint)
    files = [path.read_bytes() for path in served.context.settings.state.glob("store.db*")]
    assert files and not any(secret.encode() in text or b"webhook_secret" in text for text in files)
    job = served.on_loop(engine.jobs.get, ident, first.json()["id"])
    assert served.on_loop(engine.jobs._secret, job) == secret and "sealed" not in first.json()
    # Without the key it is known that it was done, and no more.
    kept, engine.repeats = engine.repeats, Repeats(engine.store, Secrets(engine.store, Vault(tmp_path)))
    try:
        lost = ask()
    finally:
        engine.repeats = kept
    assert (
        lost.status_code == 409 and "status 201" in lost.json()["detail"] and str(tmp_path) not in lost.text
    )


def test_an_answer_with_a_secret_is_kept_nowhere(served: Served) -> None:
    key = served.key(scopes=["node"])
    ident = "sbx_" + "o" * 20
    served.sandbox(ident, served.project("opened"))
    traffic = f"/v1/sandboxes/{ident}/traffic"
    for path in ("/v1/keys", "/v1/invites", "/v1/register", traffic, f"{traffic}/urls"):
        said = served.ask("POST", path, key, headers={"idempotency-key": "k"}, json={"name": "x"})
        assert said.status_code == 400 and "is not kept" in said.json()["detail"]


def test_of_lines_the_last_one_is_kept() -> None:
    async def main() -> None:
        sent = []

        async def send(message: Any) -> None:
            sent.append(message)

        answer = Answer(send, "req_x")
        answer.keep(100)
        head = [(b"content-type", b"application/x-ndjson")]
        await answer({"type": "http.response.start", "status": 200, "headers": head})
        for line in (b'{"type":"progress"}\n', b"x" * 200, b'{"type":"sandbox"}\n', b""):
            await answer({"type": "http.response.body", "body": line, "more_body": line != b""})
        assert answer.kept == b'{"type":"sandbox"}\n' and answer.complete
        assert (b"x-request-id", b"req_x") in sent[0]["headers"]

    asyncio.run(main())


# -- quotas ---------------------------------------------------------------------------------------------------------


def test_a_project_has_as_much_as_it_may_have(served: Served) -> None:
    operator = served.key(scopes=["node"])
    project = served.ask("POST", "/v1/projects", operator, json={"name": "bounded"}).json()["id"]
    key = served.key(project, scopes=["sandboxes", "read"])
    quotas = served.context.engine.quotas
    served.ask(
        "PATCH", "/v1/projects/bounded", operator, json={"quotas": {"memory_mib": 512, "sandboxes": 3}}
    )
    served.sandbox("sbx_" + "4" * 20, project)
    with served.on_loop(quotas.room, {"sbx_coming": Share(project, 1, 256, 100)}):
        figures = served.ask("GET", "/v1/whoami", key).json()["used"]
        assert (figures["sandboxes"], figures["memory_mib"], figures["disk_mib"]) == (2, 512, 5 * 1024 + 100)
        with pytest.raises(Exception, match="memory_mib") as caught:
            served.on_loop(quotas.check_room, Share(project, 1, 256, 100))
        assert caught.value.details == {"quota": "memory_mib", "limit": 512, "used": 512}  # type: ignore[attr-defined]
    assert served.on_loop(quotas.used, project)["sandboxes"] == 2  # kept: whoever charged it has made it
    for bad in ({"cpus": 1}, {"vcpus": -1}, {"vcpus": "2"}, {"vcpus": True}):
        assert served.ask("PATCH", "/v1/projects/bounded", operator, json={"quotas": bad}).status_code == 400


def test_a_create_is_refused_by_the_quota_it_would_pass(tmp_path: Path) -> None:
    """With the host's own VMM, so that it is the quota that refuses; nothing is made."""
    if shutil.which("qemu-system-x86_64") is None:
        pytest.skip("there is no VMM on this host")
    with serving(tmp_path, QEMU="qemu-system-x86_64") as here:
        operator, project = here.key(scopes=["node"]), here.project("refused")
        key, ident = here.key(project), "sbx_" + "q" * 20
        here.sandbox(ident, project)
        body = {"template": "base", "vcpus": 1, "memory_mib": 256, "disk_mib": 1024}
        used = {"sandboxes": 1, "vcpus": 1, "memory_mib": 256, "disk_mib": 5 * 1024}
        wanted = {"sandboxes": 1, "vcpus": 1, "memory_mib": 256, "disk_mib": 1024}

        def create() -> httpx.Response:
            return here.ask("POST", "/v1/sandboxes", key, json=body)

        for quota, more in wanted.items():
            limit = used[quota] + more - 1  # one less than it would take
            only = {**dict.fromkeys(wanted), quota: limit}
            here.ask("PATCH", f"/v1/projects/{project}", operator, json={"quotas": only})
            said = create()
            assert (said.status_code, said.json()["code"]) == (429, "quota"), said.text
            assert said.json()["details"] == {"quota": quota, "limit": limit, "used": used[quota]}
        only = {**dict.fromkeys(wanted), "creates_per_s": 0.01}
        here.ask("PATCH", f"/v1/projects/{project}", operator, json={"quotas": only})
        here.on_loop(here.context.engine.quotas.check_rate, project)  # the one that there was
        said = create()
        assert said.status_code == 429 and said.json()["details"]["quota"] == "creates_per_s", said.text
        assert 90 <= int(said.headers["retry-after"]) <= 100
        assert [row["id"] for row in here.ask("GET", "/v1/sandboxes", key).json()["data"]] == [ident]
        assert here.ask("GET", "/v1/whoami", key).json()["used"]["vcpus"] == 1


def test_what_is_paused_takes_disk_alone_and_what_ended_takes_nothing(served: Served) -> None:
    project, ident = served.project("counted", vcpus=1), "sbx_" + "5" * 20
    engine = served.context.engine
    row = served.sandbox(ident, project)
    from llm4agents.engine import clock

    def used() -> tuple[float, float]:
        found = served.on_loop(engine.quotas.used, project)
        return found["vcpus"], found["disk_mib"]

    assert used() == (1, 5 * 1024)
    for state, expected in (("pausing", (1, 5120)), ("paused", (0, 5120))):
        served.on_loop(engine.store.transition, row, state, None, clock.stamp())
        assert used() == expected
    other = served.sandbox("sbx_" + "6" * 20, project)
    with pytest.raises(Exception, match="vcpus"):
        served.on_loop(engine.quotas.check_resume, row)
    served.on_loop(engine.store.transition, other, "killed", None, clock.stamp())
    served.on_loop(engine.quotas.check_resume, row)

    def at_once() -> None:
        """Two resumes at once, of which there is room for one; the first does not come to anything."""
        with engine.quotas.resuming(row):
            assert engine.quotas.used(project)["vcpus"] == 1
            with pytest.raises(Exception, match="vcpus"):
                engine.quotas.check_resume(row)
        assert engine.quotas.used(project)["vcpus"] == 0

    served.on_loop(at_once)
    served.on_loop(engine.store.transition, row, "killed", None, clock.stamp())
    assert used() == (0, 0)


# -- registration -----------------------------------------------------------------------------------------------------


def test_an_invite_is_a_project_and_a_key(served: Served) -> None:
    operator = served.key(scopes=["node"])
    made = served.ask("POST", "/v1/invites", operator, json={"note": "n", "quotas": {"sandboxes": 2}}).json()
    assert made["invite"] not in served.ask("GET", "/v1/invites", operator).text
    taken = served.ask("POST", "/v1/register", json={"invite": made["invite"], "name": "default"})
    assert taken.status_code == 409  # and the invite is as good as before
    said = served.ask("POST", "/v1/register", json={"invite": made["invite"], "name": "newcomer"})
    assert said.status_code == 201 and said.json()["project"]["quotas"] == {"sandboxes": 2}
    who = served.ask("GET", "/v1/whoami", said.json()["key"]).json()
    assert who["project_name"] == "newcomer" and "project" in who["scopes"] and "node" not in who["scopes"]
    again = served.ask("POST", "/v1/register", json={"invite": made["invite"], "name": "second"})
    assert (again.status_code, again.json()["code"]) == (403, "forbidden")
    served.context.engine.invites._attempts.clear()
    for at in range(limits.REGISTRATIONS_PER_MINUTE):
        wrong = served.ask("POST", "/v1/register", json={"invite": f"l4i_{at}", "name": "x"})
        assert wrong.status_code == 403
    slow = served.ask("POST", "/v1/register", json={"invite": "l4i_x", "name": "x"})
    assert slow.status_code == 429 and int(slow.headers["retry-after"]) >= 1


def test_registration_is_off_unless_it_is_on(tmp_path: Path) -> None:
    with serving(tmp_path) as here:
        said = here.ask("POST", "/v1/register", json={"invite": "l4i_x", "name": "x"})
        assert said.status_code == 403 and "registrations" in said.json()["detail"]


# -- keys are nowhere -------------------------------------------------------------------------------------------------


def test_no_key_or_invite_is_in_log_audit_or_store(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file, serving(tmp_path / "served", REGISTRATION="1") as here:
        from llm4agents.api.server import configure_logs

        configure_logs("debug")
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(file))
        try:
            operator = here.key(scopes=["node"])
            made = here.ask(
                "POST", "/v1/keys", operator, json={"name": "n", "scopes": ["read", "project"]}
            ).json()["key"]
            code = here.ask("POST", "/v1/invites", operator, json={}).json()["invite"]
            theirs = here.ask("POST", "/v1/register", json={"invite": code, "name": "they"}).json()["key"]
            for key in (made, theirs):
                here.ask("GET", "/v1/whoami", key, headers={"x-request-id": key})
                here.ask("DELETE", "/v1/keys/key_x", key, headers={"x-request-id": f"x.{key}"})
                here.ask("DELETE", f"/v1/keys/{key}", key)  # the key for its id
                here.ask("PUT", f"/v1/secrets/{key}", key, json={"value": "canary"})
                here.ask("POST", f"/v1/sandboxes/{key}/exec?key={key}", key, json={"command": key})
                here.ask("GET", f"/v1/none/{key}", key)
                here.ask("DELETE", f"/v1/keys/key_{key[4:12]}", operator)
                assert here.ask("GET", "/v1/whoami", key).status_code == 401
            unused = here.ask("POST", "/v1/invites", operator, json={}).json()["invite"]
            here.sandbox(ONE, "default", traffic={"public": False, "generation": 0})
            token = here.ask("POST", f"/v1/sandboxes/{ONE}/traffic", operator, json={}).json()["token"]
            for secret, what in ((code, "invite"), (unused, "invite"), (token, "token")):
                for path in (f"/v1/invites/{secret}", f"/v1/secrets/{secret}", f"/v1/sandboxes/{secret}"):
                    said = here.ask("DELETE", path, operator, headers={"x-request-id": secret})
                    assert said.status_code == 400 and what in said.json()["detail"], said.text
                    assert secret[8:] not in said.text
                half = "/v1/none/" + "x" * (485 - len("/v1/none/")) + secret  # cut at 500
                here.ask("DELETE", half, operator)
                here.ask("DELETE", f"/v1/invites/{secret}", made)
            missed = here.ask("DELETE", "/v1/invites/mistyped", operator)
            assert missed.status_code == 404 and "mistyped" not in missed.text
            rows = json.dumps(here.audit())
        finally:
            structlog.reset_defaults()
    files = [path for path in (tmp_path / "served").rglob("*") if path.is_file()]
    assert any(path.name == "store.db" for path in files)
    held = log.read_bytes() + rows.encode() + b"".join(path.read_bytes() for path in files)
    assert b"key_created" in held
    for secret in (operator, made, theirs, code, unused, token):
        assert secret.encode() not in held and secret[13:].encode() not in held


def test_keys_that_are_good_no_more_are_kept_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "KEYS_GONE_KEPT", 3)
    monkeypatch.setattr(limits, "KEYS_PER_PROJECT_MAX", 5)
    with serving(tmp_path) as here:
        mine, other = here.project("churns"), here.key(here.project("other"), scopes=["read", "project"])
        key = here.key(mine, scopes=["read", "project"])
        made: list[str] = []

        def kept() -> list[str]:
            held = [row["id"] for row in here.ask("GET", "/v1/keys", key).json()["data"]]
            stored = here.on_loop(stored_keys.rows, here.context.engine.store)
            assert held == [row.id for row in stored if row.project == mine]
            return held

        for at in range(6):
            said = here.ask("POST", "/v1/keys", key, json={"name": f"n{at}", "scopes": ["read"]}).json()
            made.append(said["id"])
            assert here.ask("DELETE", f"/v1/keys/{said['id']}", key).status_code == 200
        assert kept() == [f"key_{key[4:12]}", *made[-3:]]
        assert here.ask("GET", f"/v1/keys/{made[0]}", key).status_code == 404
        assert "is revoked" in here.ask("GET", "/v1/whoami", said["key"]).json()["detail"]
        # What has expired takes no good key's place, and goes in its turn.
        wish = {"name": "short", "scopes": ["read"], "expires_days": 1e-9}
        made += [here.ask("POST", "/v1/keys", key, json=wish).json()["id"] for _ in range(6)]
        good = [here.ask("POST", "/v1/keys", key, json={"name": "g"}).json()["id"] for _ in range(4)]
        assert kept() == [f"key_{key[4:12]}", *made[-3:], *good]
        full = here.ask("POST", "/v1/keys", key, json={"name": "one too many"})
        assert full.status_code == 400 and "the project has 5 keys" in full.json()["detail"]
        assert len(here.ask("GET", "/v1/keys", other).json()["data"]) == 1


# -- and it costs little ----------------------------------------------------------------------------------------------


def test_a_key_s_use_is_written_at_most_once_a_minute(served: Served) -> None:
    key = served.key()
    served.ask("GET", "/v1/whoami", key)
    row = served.on_loop(served.context.engine.keys.get, f"key_{key[4:12]}", None)
    first = row.used_at
    for _ in range(5):
        served.ask("GET", "/v1/whoami", key)
    assert row.used_at == first is not None
    row.used_at -= 61
    served.ask("GET", "/v1/whoami", key)
    assert row.used_at >= first
