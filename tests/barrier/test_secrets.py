"""Secrets as their users have them: HTTP, SDK and command line against a real server. No sandbox is needed."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llm4agents import AsyncSecrets, InvalidRequestError, NotFoundError, Secrets
from llm4agents.store.opening import backup
from tests.support import Node, eventually, sdk_of

CANARY = "c4nary-8d1f/5e+b=2"


def everywhere(node: Node) -> list[Path]:
    """The files of a node's own that have the canary in them."""
    files = [path for path in node.home.rglob("*") if path.is_file()]
    assert node.state / "store.db" in files and node.home / "stderr" in files
    return [path for path in files if CANARY.encode() in path.read_bytes()]


def test_http_tells_names_and_versions_and_never_a_value(shared_node: Node) -> None:
    node = shared_node
    made = node.call("PUT", "/v1/secrets/HTTP", json={"value": CANARY})
    again = node.call("PUT", "/v1/secrets/HTTP", json={"value": CANARY + "2"})
    assert (made["version"], again["version"]) == (1, 2)
    listed = node.call("GET", "/v1/secrets")
    assert [set(one) for one in listed["data"]] == [{"name", "version", "created_at", "updated_at"}]
    for path in ("/v1/secrets/HTTP", "/v1/secrets/HTTP/value"):
        answer = node.http.get(path)
        assert answer.status_code in (404, 405) and CANARY not in answer.text
    assert node.call("DELETE", "/v1/secrets/HTTP") == {"name": "HTTP", "removed": True, "used_by": []}
    gone = node.http.delete("/v1/secrets/HTTP")
    assert (gone.status_code, gone.json()["code"]) == (404, "not_found")
    assert node.call("GET", "/v1/secrets") == {"data": []}
    assert not everywhere(node)


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(CANARY),
        json.dumps([CANARY]),
        json.dumps({"value": [CANARY]}),
        json.dumps({"value": {CANARY: CANARY}}),
        json.dumps({"value": {"access_key_id": CANARY + " x", "secret_access_key": CANARY}}),
        json.dumps({"value": CANARY, CANARY: 1}),
        json.dumps({"value": CANARY + "\0"}),
        json.dumps({"value": CANARY * 10_000}),
        '{"value": "' + CANARY,
        '{"value": NaN, "' + CANARY + '": ',
        "[" * 100_000 + CANARY,
        CANARY,
        "",
    ],
)
def test_a_bad_body_is_refused_and_repeated_nowhere(shared_node: Node, content: str) -> None:
    answer = shared_node.http.put(
        "/v1/secrets/BAD", content=content, headers={"content-type": "application/json"}
    )
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert CANARY not in answer.text and answer.json()["detail"]
    assert shared_node.call("GET", "/v1/secrets") == {"data": []}
    assert not everywhere(shared_node)


def test_a_value_in_the_names_place_is_not_repeated(shared_node: Node) -> None:
    for method in ("PUT", "DELETE"):
        answer = shared_node.http.request(method, "/v1/secrets/sk%3Alive%3A" + "x" * 70, json={"value": "v"})
        assert (answer.status_code, "live" in answer.text) == (400, False)


def test_a_body_without_end_is_cut_off(shared_node: Node) -> None:
    def endless() -> Any:
        for _ in range(64):
            yield b" " * 65_536

    answer = shared_node.http.put("/v1/secrets/LONG", content=endless())
    assert answer.status_code == 400 and "at most" in answer.json()["detail"]


def test_the_schema_says_that_it_is_written_only(shared_node: Node) -> None:
    paths = shared_node.call("GET", "/openapi.json")["paths"]
    assert {path: set(paths[path]) for path in paths if "secrets" in path} == {
        "/v1/secrets": {"get"},
        "/v1/secrets/{name}": {"put", "delete"},
    }
    schema = paths["/v1/secrets/{name}"]["put"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["value"]["oneOf"][0]["writeOnly"] is True


def test_a_stores_backup_holds_sealed_bytes(shared_node: Node) -> None:
    shared_node.call("PUT", "/v1/secrets/KEPT", json={"value": CANARY})
    copy = backup(shared_node.state / "store.db", "test")
    assert b"KEPT" in copy.read_bytes() and not everywhere(shared_node)
    # Positive control: the same search finds what is planted.
    (shared_node.state / "backups" / "planted").write_text(f"x{CANARY}x")
    assert [path.name for path in everywhere(shared_node)] == ["planted"]
    (shared_node.state / "backups" / "planted").unlink()
    shared_node.call("DELETE", "/v1/secrets/KEPT")


def test_the_sdk_sets_lists_and_removes(shared_node: Node) -> None:
    with sdk_of(shared_node):
        secrets = Secrets()
        info = secrets.set("SDK", CANARY)
        assert (info.name, info.version) == ("SDK", 1) and info.created_at is not None
        assert secrets.set("SDK", {"access_key_id": "A", "secret_access_key": "B"}).version == 2
        assert [one.name for one in secrets.list()] == ["SDK"]
        with pytest.raises(InvalidRequestError) as caught:
            secrets.set("SDK", {"access_key_id": CANARY})
        assert CANARY not in str(caught.value)
        assert secrets.remove("SDK") == []
        with pytest.raises(NotFoundError):
            secrets.remove("SDK")

        async def same() -> int:
            async with AsyncSecrets() as held:
                version = (await held.set("ASYNC", CANARY)).version
                assert [one.name for one in await held.list()] == ["ASYNC"]
                await held.remove("ASYNC")
                return version

        assert asyncio.run(same()) == 1
    assert not everywhere(shared_node)


def cli(node: Node, *args: str, stdin: str | None = "", **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "llm4agents", *args]
    return subprocess.run(
        command, input=stdin, env={**node.env, **env}, cwd="/", capture_output=True, text=True, timeout=60
    )


def value_in(node: Node, name: str) -> Any:
    """What was sealed, opened with the node's key: the one way to see it."""
    from llm4agents.barrier.vault import Vault
    from llm4agents.store import open_store
    from llm4agents.store import secrets as rows

    store = open_store(node.state / "store.db")
    try:
        row = rows.get(store, name)
        assert row is not None
        return Vault(node.state).open(row.name, row.version, row.sealed)
    finally:
        store.close()


def test_the_command_line_takes_values_from_everywhere_but_its_arguments(
    shared_node: Node, tmp_path: Path
) -> None:
    node = shared_node
    done = cli(node, "secret", "set", "CLI", stdin=CANARY + "\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "CLI is set (version 1)\n")
    assert value_in(node, "CLI") == CANARY

    assert cli(node, "secret", "set", "CLI", "--from-env", "IT", IT=CANARY + "-env").returncode == 0
    assert value_in(node, "CLI") == CANARY + "-env"

    file = tmp_path / "value"
    file.write_text(f"{CANARY}\nsecond\n")
    assert cli(node, "secret", "set", "CLI", "--from-file", str(file)).returncode == 0
    assert value_in(node, "CLI") == f"{CANARY}\nsecond"

    printed = {"Credentials": {"AccessKeyId": "AKIA1", "SecretAccessKey": CANARY, "Expiration": "soon"}}
    assert cli(node, "secret", "set", "AWS", "--aws", stdin=json.dumps(printed)).returncode == 0
    assert value_in(node, "AWS") == {"access_key_id": "AKIA1", "secret_access_key": CANARY}

    for args, stdin in (
        (["CLI", CANARY], ""),
        (["CLI"], ""),
        (["CLI", "--from-env", "NO_SUCH_VARIABLE"], ""),
        (["CLI", "--from-file", str(tmp_path / "none")], ""),
        (["CLI", "--from-env", "PATH", "--from-file", "/etc/hostname"], ""),
        (["AWS", "--aws"], CANARY),
        (["AWS", "--aws"], json.dumps({"AccessKeyId": CANARY})),
    ):
        failed = cli(node, "secret", "set", *args, stdin=stdin)
        assert failed.returncode == 2, failed
        assert CANARY not in failed.stdout + failed.stderr

    listed = cli(node, "secret", "ls")
    assert [line.split()[:2] for line in listed.stdout.splitlines()[1:]] == [["AWS", "1"], ["CLI", "3"]]
    removed = cli(node, "secret", "rm", "AWS", "CLI", "--json")
    assert [one["name"] for one in json.loads(removed.stdout)["secrets"]] == ["AWS", "CLI"]
    assert cli(node, "secret", "rm", "CLI").returncode == 3
    assert not everywhere(node)


def test_on_a_terminal_it_asks_without_echo(shared_node: Node) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "llm4agents", "secret", "set", "TTY"],
        env=shared_node.env,
        cwd="/",
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
    )
    os.close(theirs)
    seen = b""

    def asked() -> bool:
        nonlocal seen
        seen += os.read(ours, 4096)
        return b"value: " in seen

    eventually(asked)
    os.write(ours, CANARY.encode() + b"\n")
    assert process.wait(30) == 0
    seen += os.read(ours, 4096)
    os.close(ours)
    assert CANARY.encode() not in seen and b"TTY is set (version 1)" in seen
    assert value_in(shared_node, "TTY") == CANARY
    shared_node.call("DELETE", "/v1/secrets/TTY")


def test_a_lost_key_is_said_and_the_server_lives_on(shared_node: Node) -> None:
    node = shared_node
    node.call("PUT", "/v1/secrets/ONE", json={"value": CANARY})
    node.stop()
    (node.state / "vault.key").unlink()
    node.start()
    answer = node.http.put("/v1/secrets/TWO", json={"value": CANARY})
    assert (answer.status_code, answer.json()["code"]) == (503, "host_setup")
    assert "ONE" in answer.json()["detail"] and "secret rm ONE" in answer.json()["hint"]
    assert [one["name"] for one in node.call("GET", "/v1/secrets")["data"]] == ["ONE"]
    node.call("DELETE", "/v1/secrets/ONE")
    assert node.call("PUT", "/v1/secrets/TWO", json={"value": CANARY})["version"] == 1
    node.call("DELETE", "/v1/secrets/TWO")
