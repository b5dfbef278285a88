"""A server for others, with real machines: what a restart leaves alive, and what a backup brings back."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import Node, eventually

pytestmark = pytest.mark.vm
ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy" / "llm4agents.service"
SMALL = {"template": "base", "memory_mib": 256}


class Remote:
    """A client of a node's TCP listener, as one on another host would be."""

    def __init__(self, node: Node, key: str) -> None:
        found = re.findall(r'"address": "127\.0\.0\.1:(\d+)"', node.log())
        self.base = f"https://localhost:{found[-1]}"
        self.ca = node.state / "tls" / "ca.pem"
        self.http = httpx.Client(
            base_url=self.base,
            headers={"x-api-key": key},
            verify=ssl.create_default_context(cafile=self.ca),
            http2=True,
            timeout=120,
        )

    def exec(self, sandbox: str, command: str) -> Any:
        answer = self.http.post(f"/v1/sandboxes/{sandbox}/exec", json={"command": command})
        assert answer.status_code == 200, answer.text
        return answer.json()["stdout"]


def cli(node: Node, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llm4agents", *args]
    return subprocess.run(command, env=node.env, cwd="/", capture_output=True, text=True, timeout=120)


def unit_environment() -> dict[str, str]:
    """What the unit says of the process, without systemd (with it: tests/reliability/test_systemd.py)."""
    text = UNIT.read_text()
    assert "KillMode=process" in text and "RuntimeDirectoryPreserve=yes" in text and "Type=notify" in text
    return {"WATCHDOG_USEC": str(int(re.findall(r"WatchdogSec=(\d+)", text)[0]) * 1_000_000)}


def test_a_restart_as_systemd_does_it_and_a_backup(nodes: Callable[..., Node], tmp_path: Path) -> None:
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.settimeout(60)
    told = tmp_path / "notify"
    notify.bind(str(told))

    def next_word(word: str) -> None:
        while word not in notify.recv(4_096).decode().split("\n"):
            pass

    node = nodes(
        LLM4AGENTS_LISTEN="127.0.0.1:0",
        LLM4AGENTS_DOMAIN="sbx.localhost",
        LLM4AGENTS_TLS_LOCAL="1",
        LLM4AGENTS_DRAIN_S="60",
        LLM4AGENTS_SERVER_IDLE_EXIT_S="0.2",
        NOTIFY_SOCKET=str(told),
        **unit_environment(),
    ).start()
    next_word("READY=1")
    next_word("WATCHDOG=1")
    key = node.call("POST", "/v1/keys", json={"name": "test"})["key"]
    node.call("PUT", "/v1/secrets/TOKEN", json={"value": "s3cret"})
    remote = Remote(node, key)
    created = remote.http.post("/v1/sandboxes", json=SMALL)
    assert created.status_code in (200, 201), created.text
    sandbox = created.json()["id"]
    assert remote.exec(sandbox, "echo over TLS") == "over TLS\n"

    # systemctl restart: SIGTERM for the main process alone, while a call is under way.
    late: list[str] = []
    call = threading.Thread(target=lambda: late.append(remote.exec(sandbox, "sleep 3; echo late")))
    call.start()
    eventually(lambda: [row for row in node.call("GET", "/v1/top")["data"] if row["calls"]], 20)
    vmm, process = node.vmm(sandbox), node.process
    assert process is not None
    process.send_signal(signal.SIGTERM)
    next_word("STOPPING=1")
    stopping = node.http.get("/health")
    assert (stopping.status_code, stopping.json()["status"]) == (503, "stopping")
    assert node.http.post("/v1/sandboxes", json=SMALL).status_code == 503
    with pytest.raises(httpx.ConnectError):
        httpx.get(remote.base, verify=ssl.create_default_context(cafile=remote.ca))
    call.join(60)
    assert late == ["late\n"], node.log()[-2000:]
    assert process.wait(60) == 0
    assert Path(f"/proc/{vmm}").exists()
    remote.http.close()

    node.start()
    next_word("READY=1")
    remote = Remote(node, key)  # the same CA, the same key
    assert remote.exec(sandbox, "echo again") == "again\n"
    assert node.vmm(sandbox) == vmm
    assert remote.http.get("/health").json()["status"] in ("ok", "degraded")
    gauges = node.http.get("/metrics").text
    assert "llm4agents_listener_connections 1.0" in gauges
    assert remote.http.get("/metrics").status_code == 403

    # A backup: one sandbox paused, one that runs.
    remote.exec(sandbox, "echo kept > /home/user/kept; (sleep 9999 &)")
    node.call("POST", f"/v1/sandboxes/{sandbox}/pause", json={})
    running = node.create(**SMALL)
    volume = node.call("POST", "/v1/volumes", json={"name": "data", "size_mib": 16})["id"]
    project = node.call("POST", "/v1/projects", json={"name": "kept", "quotas": {"sandboxes": 7}})["id"]
    wish = {"command": "true", "at": time.time() + 86_400}
    job = node.call("POST", f"/v1/sandboxes/{sandbox}/jobs", json=wish)["id"]
    # The file system of a volume is no matter: bytes that only its own disk can have.
    with (node.state / "volumes" / f"{volume}.raw").open("r+b") as disk:
        disk.seek(9 << 20)
        disk.write(b"kept in a volume")
    audited = node.call("GET", "/v1/audit?limit=1000")["data"]
    file = tmp_path / "all.tar"
    done = cli(node, "server", "backup", str(file), "--with-disks", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sandboxes"] == 1
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.stat().st_blocks * 512 < 400 << 20
    assert cli(node, "server", "backup", str(file)).returncode != 0  # it replaces nothing
    bare = tmp_path / "bare.tar"
    assert cli(node, "server", "backup", str(bare)).returncode == 0
    refused = remote.http.post("/v1/server/backup", json={"file": str(tmp_path / "x.tar")})
    assert refused.status_code == 403
    assert cli(node, "server", "restore", str(file)).returncode != 0  # a state directory that is in use
    for ident in (running, sandbox):
        node.call("DELETE", f"/v1/sandboxes/{ident}")
    node.stop()
    assert not list(node.state.glob(".backup-*"))
    remote.http.close()
    notify.close()

    restored = nodes(
        LLM4AGENTS_LISTEN="127.0.0.1:0", LLM4AGENTS_TLS_LOCAL="1", LLM4AGENTS_DOMAIN="sbx.localhost"
    )
    damaged = tmp_path / "damaged.tar"
    damaged.write_bytes(file.read_bytes()[: 1 << 20])
    assert "no whole backup" in cli(restored, "server", "restore", str(damaged)).stderr
    done = cli(restored, "server", "restore", str(file), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"sandboxes": 1, "lost": 1, "volumes": 1, "volumes_lost": 0}
    restored.start()
    assert (restored.state / "tls" / "ca.pem").read_bytes() == (node.state / "tls" / "ca.pem").read_bytes()
    remote = Remote(restored, key)
    assert remote.http.get("/v1/secrets").json()["data"][0]["name"] == "TOKEN"
    assert restored.get(running)["state"] == "failed"
    assert "backup" in restored.get(running)["reason"]
    assert restored.get(sandbox)["state"] == "paused"
    assert [row["id"] for row in restored.call("GET", "/v1/volumes")["data"]] == [volume]
    with (restored.state / "volumes" / f"{volume}.raw").open("rb") as disk:
        disk.seek(9 << 20)
        assert disk.read(16) == b"kept in a volume" and disk.seek(0, os.SEEK_END) >= 16 << 20
    kept = restored.call("GET", f"/v1/projects/{project}")
    assert (kept["name"], kept["quotas"]) == ("kept", {"sandboxes": 7})
    assert restored.call("GET", f"/v1/sandboxes/{sandbox}/jobs/{job}")["state"] == "waiting"
    assert audited and audited[-1] in restored.call("GET", "/v1/audit?limit=1000")["data"]
    assert remote.exec(sandbox, "cat kept; pgrep -c sleep") == "kept\n1\n"  # its memory too
    remote.http.close()
    restored.call("DELETE", f"/v1/sandboxes/{sandbox}")
    restored.stop()

    without = nodes()
    done = cli(without, "server", "restore", str(bare), "--json")
    assert json.loads(done.stdout) == {"sandboxes": 0, "lost": 2, "volumes": 0, "volumes_lost": 1}
    without.start()
    assert without.get(sandbox)["state"] == "failed"
    assert without.call("GET", "/v1/secrets")["data"][0]["name"] == "TOKEN"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_the_unit_is_one(tmp_path: Path) -> None:
    """Nothing in it is unknown but what this systemd is too old for (tests/reliability/test_systemd.py runs it)."""
    done = subprocess.run(
        ["systemd-analyze", "verify", str(UNIT)],
        capture_output=True,
        text=True,
        env={**os.environ, "SYSTEMD_LOG_COLOR": "0"},
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if "llm4agents.service" in line]
    unknown = [line for line in said if "DelegateSubgroup" not in line and "is not executable" not in line]
    assert not unknown, unknown


def test_the_containerfile_can_be_read() -> None:
    """There is no container engine where this runs: every instruction is one, and what it copies is there."""
    known = {
        "FROM",
        "RUN",
        "COPY",
        "ENV",
        "VOLUME",
        "EXPOSE",
        "STOPSIGNAL",
        "HEALTHCHECK",
        "ENTRYPOINT",
        "CMD",
    }
    text = (ROOT / "deploy" / "Containerfile").read_text()
    lines = re.sub(
        r"\\\n\s*", " ", "\n".join(x for x in text.splitlines() if not x.startswith("#"))
    ).splitlines()
    words = [line.split(maxsplit=1) for line in lines if line.strip()]
    assert {word for word, _ in words} <= known
    for word, rest in words:
        if word in ("ENTRYPOINT", "CMD", "VOLUME"):
            assert isinstance(json.loads(rest), list)
        if word == "HEALTHCHECK":
            compile(json.loads(rest.partition("CMD ")[2])[2], "healthcheck", "exec")
    for needed in ("/dev/kvm", "/dev/net/tun", "NET_ADMIN", "SYS_ADMIN"):
        assert needed in text
    # Templates are made from the package lists: in an image without them none can be built.
    assert "/var/lib/apt/lists" not in text.rpartition("FROM ")[2]
