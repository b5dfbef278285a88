"""Two projects on one server, over its TCP listener, with a real microVM: nothing of one is the other's."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from llm4agents import Sandbox, config
from llm4agents.errors import (
    AuthenticationError,
    ForbiddenError,
    QuotaError,
    SandboxNotFoundError,
    TemplateNotFoundError,
)
from llm4agents.sdk._sync.client import Client
from tests.support import Node, eventually

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]

SMALL: dict[str, Any] = {"memory_mib": 256, "timeout": 600}
SECRET = "canary-of-a-project"
MINE = f"mine-{os.getpid()}"


@dataclass
class Team:
    node: Node
    url: str
    ours: str
    theirs: str
    keys: list[str] = field(default_factory=list)

    def cli(self, *words: str, key: str | None = None) -> Any:
        """What a command says as JSON: of the operator over the socket, or with a key over TCP."""
        env = dict(self.node.env)
        if key is not None:
            env |= {"LLM4AGENTS_URL": self.url, "LLM4AGENTS_API_KEY": key}
        command = [sys.executable, "-m", "llm4agents", *words, "--json"]
        done = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def key(self, *words: str) -> str:
        made = str(self.cli("key", "create", "--name", "a test's", *words)["key"])
        self.keys.append(made)
        return made

    @contextlib.contextmanager
    def as_(self, key: str) -> Iterator[None]:
        """Within it the SDK of this process is a client of the listener, with that key."""
        patch = pytest.MonkeyPatch()
        patch.setenv("LLM4AGENTS_URL", self.url)
        patch.setenv("LLM4AGENTS_API_KEY", key)
        config.settings.cache_clear()
        try:
            yield
        finally:
            patch.undo()
            config.settings.cache_clear()

    def raw(self, method: str, path: str, key: str, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", **options.pop("headers", {})}
        return httpx.request(method, self.url + path, headers=headers, timeout=120, **options)


@pytest.fixture(scope="module")
def team(shared_nodes: Callable[..., Node]) -> Iterator[Team]:
    node = shared_nodes(LLM4AGENTS_LISTEN="127.0.0.1:0").start()
    address = node.call("GET", "/v1/server")["listen"].rpartition("/")[2]
    team = Team(node, f"http://{address}", "", "")
    ours = team.cli("project", "create", "ours", "--quota", "sandboxes=1")["id"]
    team.cli("project", "create", "theirs")
    team.ours, team.theirs = team.key("--project", ours), team.key("--project", "theirs")
    yield team


def test_two_projects_on_one_server(team: Team) -> None:
    node = team.node
    with team.as_(team.ours), Sandbox("base", **SMALL) as box:
        box.files.write("note", "ours")
        assert box.exec("cat note").stdout == "ours"
        assert node.get(box.id)["project"] == Client().whoami()["project"]

        with team.as_(team.theirs):
            for act in (lambda: Sandbox.connect(box.id), lambda: Sandbox.connect("sbx_" + "0" * 20)):
                with pytest.raises(SandboxNotFoundError):
                    act()
            assert not Sandbox.list()
        here = f"/v1/sandboxes/{box.id}"
        for method, path in (
            ("GET", "/files?path=note"),
            ("POST", "/exec"),
            ("GET", "/logs"),
            ("GET", "/network/log"),
            ("GET", "/network/capture"),
            ("GET", "/ports/8000/"),
            ("GET", "/isolation"),
            ("POST", "/jobs"),
            ("DELETE", ""),
        ):
            assert team.raw(method, here + path, team.theirs).status_code == 404, path

        # A project's quota holds for everything that would run.
        with pytest.raises(QuotaError) as full:
            Sandbox("base", **SMALL)
        assert full.value.details["quota"] == "sandboxes"
        with pytest.raises(QuotaError):
            box.fork()
        team.cli("project", "set", "ours", "--quota", "sandboxes=none", "--quota", "creates_per_s=0.01")
        for clone in box.fork():  # one may be made at once
            clone.kill()
        with pytest.raises(QuotaError) as full:
            box.fork()
        assert full.value.details["quota"] == "creates_per_s"
        team.cli("project", "set", "ours", "--quota", "sandboxes=1", "--quota", "creates_per_s=none")

        # A template that is made of it is the project's alone.
        made = box.snapshot(MINE)
        assert made["name"] == MINE and made["project"] == node.get(box.id)["project"]
        assert MINE in {one["name"] for one in Client().templates()}
        with team.as_(team.theirs):
            assert MINE not in {one["name"] for one in Client().templates()}
            with pytest.raises(TemplateNotFoundError):
                Sandbox(MINE, **SMALL)
            with pytest.raises(TemplateNotFoundError):
                Client().remove_template(MINE)
            with pytest.raises(ForbiddenError):
                Client().remove_template("base")
        box.kill()
        with Sandbox(MINE, **SMALL) as copy:
            assert copy.exec("cat note").stdout == "ours"
            assert node.get(copy.id)["template"] == MINE
        Client().remove_template(MINE)
    assert not list(node.cache.glob(f"templates/{MINE}*"))


def test_a_create_that_is_sent_twice_is_one_sandbox(team: Team) -> None:
    wish = {"template": "base", "memory_mib": 256}
    once = {"headers": {"idempotency-key": "only-once"}, "json": wish}
    first, second = (team.raw("POST", "/v1/sandboxes", team.ours, **once) for _ in range(2))
    assert first.status_code == second.status_code == 201 and first.json()["id"] == second.json()["id"]
    ident = first.json()["id"]
    listed = team.raw("GET", "/v1/sandboxes?state=running", team.ours).json()["data"]
    assert [one["id"] for one in listed] == [ident]
    # Paused it takes no place; then another may run, and it may not come back.
    paused = team.raw("POST", f"/v1/sandboxes/{ident}/pause", team.ours, json={})
    assert paused.json()["state"] == "paused"
    other = team.raw("POST", "/v1/sandboxes", team.ours, json=wish).json()["id"]
    refused = team.raw("POST", f"/v1/sandboxes/{ident}/exec", team.ours, json={"command": "true"})
    assert (refused.status_code, refused.json()["code"]) == (429, "quota")
    for one in (ident, other):
        assert team.raw("DELETE", f"/v1/sandboxes/{one}", team.ours).status_code == 200


def test_the_memory_of_a_paused_sandbox_is_in_its_project_s_disk(team: Team) -> None:
    def bounded(disk_mib: int) -> float:
        shown = team.cli("project", "set", "ours", "--quota", f"disk_mib={disk_mib}")
        return float(shown["used"]["disk_mib"])

    try:
        bounded(66)
        with team.as_(team.ours), Sandbox("base", disk_mib=64, **SMALL) as box:
            box.exec("head -c 24M /dev/urandom > /dev/shm/much; echo kept > /dev/shm/mem")
            with pytest.raises(QuotaError, match="runs on, its memory takes") as full:
                box.pause()
            assert full.value.details["quota"] == "disk_mib" and full.value.details["used"] == 64
            # Nor at its time: it is not ended for that, and says why.
            box.set_timeout(1, on_timeout="pause")
            eventually(lambda: str(team.node.get(box.id)["reason"]).startswith("pause failed"), 30)
            box.set_timeout(600)
            assert box.exec("cat /dev/shm/mem").stdout == "kept\n"
            bounded(200)
            held = box.pause().pause
            assert held is not None
            assert bounded(200) == 64 + -(-held["pages_bytes"] >> 20)
            assert box.exec("cat /dev/shm/mem").stdout == "kept\n" and bounded(200) == 64
            box.kill()  # the end of `with` leaves one that was paused
    finally:
        team.cli("project", "set", "ours", "--quota", "disk_mib=none")


def test_what_is_done_is_in_the_audit_and_keys_are_nowhere(team: Team) -> None:
    spare = team.key("--project", "ours", "--scope", "read", "--scope", "secrets")
    with team.as_(spare):
        assert team.raw("PUT", "/v1/secrets/TOKEN", spare, json={"value": SECRET}).status_code == 200
        with pytest.raises(ForbiddenError):
            Sandbox("base", **SMALL)
    rows = team.cli("audit", "-n", "5", key=spare)["audit"]
    assert [(row["action"], row["status"]) for row in rows[:2]] == [
        ("POST /v1/sandboxes", 403),
        ("PUT /v1/secrets/{name}", 200),
    ]
    ident = f"key_{spare[4:12]}"
    assert {row["actor"] for row in rows[:2]} == {ident}
    team.cli("key", "revoke", ident)
    with team.as_(spare), pytest.raises(AuthenticationError):
        Client().whoami()
    revoked = [row for row in team.cli("audit")["audit"] if row["action"] == "DELETE /v1/keys/{key}"]
    assert revoked[0]["actor"] == "socket" and revoked[0]["target"].endswith(ident)
    held = team.node.log()
    files = [path for path in team.node.state.rglob("*") if path.is_file() and path.stat().st_size < 64 << 20]
    for key in (*team.keys, SECRET):
        assert key not in held
        assert not [path for path in files if key.encode() in path.read_bytes()], key[:4]


def test_a_volume_is_its_projects(team: Team) -> None:
    def made(key: str, **body: Any) -> httpx.Response:
        return team.raw("POST", "/v1/volumes", key, json={"name": "data", "size_mib": 8, **body})

    mine, theirs = made(team.ours).json()["id"], made(team.theirs).json()["id"]
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/snapshot"),
        ("POST", "/clone"),
        ("POST", "/resize"),
        ("GET", "/files?path=/"),
        ("GET", "/files/stat?path=/"),
        ("GET", "/files/list?path=/"),
        ("GET", "/files/tar?path=/"),
    ):
        assert team.raw(method, f"/v1/volumes/{mine}{path}", team.theirs).status_code == 404, path
    assert made(team.theirs, name="copy", source=mine).status_code == 404
    wish = {"template": "base", "memory_mib": 256, "volumes": [{"volume": mine, "path": "/data"}]}
    assert team.raw("POST", "/v1/sandboxes", team.theirs, json=wish).status_code == 404
    listed = team.raw("GET", "/v1/volumes", team.theirs).json()["data"]
    assert [one["id"] for one in listed] == [theirs]
    project = team.raw("GET", "/v1/whoami", team.theirs).json()["project"]
    team.node.call("PATCH", f"/v1/projects/{project}", json={"quotas": {"volumes_mib": 20}})
    for answer in (
        made(team.theirs, name="more", size_mib=13),
        team.raw("POST", f"/v1/volumes/{theirs}/resize", team.theirs, json={"size_mib": 21}),
    ):
        assert answer.status_code == 429 and answer.json()["details"]["quota"] == "volumes_mib", answer.text
    for key, ident in ((team.ours, mine), (team.theirs, theirs)):
        assert team.raw("DELETE", f"/v1/volumes/{ident}", key).status_code == 200
