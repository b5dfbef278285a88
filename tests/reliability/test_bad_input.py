"""What nobody should ask for, asked through the public SDK: each is refused in words, and hurts nobody.

Not here: faults of guests and hosts (`test_faults`), servers that die under the SDK (`test_recovery`).
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm4agents import (
    GuestError,
    InvalidRequestError,
    PathNotFoundError,
    Sandbox,
    SandboxNotFoundError,
    TemplateNotFoundError,
)
from llm4agents.errors import LLM4AgentsError
from tests.support import Node, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]

MIB = 1 << 20
BIG = 3 << 30 if os.environ.get("LLM4AGENTS_TEST_BIG") else 256 * MIB
"""3 GiB take minutes in emulation; four times what the server may grow by proves the same."""


@pytest.fixture(scope="module")
def node(shared_node: Node) -> Iterator[Node]:
    with sdk_of(shared_node):
        yield shared_node


@pytest.fixture(scope="module")
def box(node: Node) -> Iterator[Sandbox]:
    with Sandbox("base") as sandbox:
        yield sandbox


@pytest.mark.parametrize("name", ["nope", "../base", "base/../base", "BASE", "a" * 129, "b\x00se", " "])
def test_templates_that_are_none(node: Node, name: str) -> None:
    with pytest.raises((TemplateNotFoundError, InvalidRequestError)):
        Sandbox(name)


@pytest.mark.parametrize(
    "wish",
    [
        {"memory_mib": 0},
        {"memory_mib": 255},
        {"memory_mib": 300},
        {"memory_mib": -1024},
        {"memory_mib": 1 << 40},
        {"memory_mib": 1024.5},
        {"vcpus": 0},
        {"vcpus": -1},
        {"vcpus": 4096},
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": float("nan")},
        {"life": 10**9},
        {"env": {"A=B": "x"}},
        {"env": {"A": "\0"}},
        {"env": {"A": "x" * 40_000}},
        {"metadata": {"a": "x" * 20_000}},
    ],
)
def test_shapes_that_cannot_be(node: Node, wish: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Sandbox("base", **wish)
    assert caught.value.outcome == "not_started"
    assert next(iter(wish)) in str(caught.value) or "environment" in str(caught.value)


def test_more_memory_than_there_is_is_refused_before_anything_is_built(node: Node) -> None:
    before = node.machines()
    with pytest.raises(LLM4AgentsError, match="memory"):
        Sandbox("base", memory_mib=1 << 20)
    # Other tests build other shapes in this cache meanwhile.
    assert not [row for row in node.call("GET", "/v1/templates")["data"] if row.get("memory_mib") == 1 << 20]
    assert node.machines() == before


def test_a_path_never_leads_to_the_host(box: Sandbox, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("the host's")
    for path in (str(mine), f"../../../../../..{mine}", f"/proc/self/root{mine}", f"/proc/1/root{mine}"):
        with pytest.raises((PathNotFoundError, GuestError, InvalidRequestError)):
            box.files.read(path, user="root")
    assert box.files.read("../../etc/hostname").strip() == box.id.replace("_", "-")
    link = f"leak-{secrets.token_hex(4)}"
    box.exec(["ln", "-s", str(mine), link])
    with pytest.raises((PathNotFoundError, GuestError)):
        box.files.read(link)
    box.files.write(f"/tmp/{link}", "the guest's")
    assert not Path(f"/tmp/{link}").exists()
    assert mine.read_text() == "the host's"


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 5_000, "y/" * 3_000])
def test_paths_that_are_none(box: Sandbox, path: str) -> None:
    with pytest.raises(InvalidRequestError):
        box.files.read(path)
    with pytest.raises(InvalidRequestError):
        box.files.write(path, "x")


@pytest.mark.parametrize("path", ["n" * 300, "/proc/nothing/here", "/sys/kernel/nothing", "/etc/passwd/x"])
def test_places_that_take_no_file(box: Sandbox, path: str) -> None:
    with pytest.raises((GuestError, PathNotFoundError, InvalidRequestError)) as caught:
        box.files.write(path, "x", user="root")
    assert path[:20] in str(caught.value), "the error names the path"
    assert box.exec("echo fine").stdout == "fine\n"


def test_files_without_a_size_and_without_an_end(box: Sandbox) -> None:
    assert "Linux" in box.files.read("/proc/version")
    box.exec(["mkfifo", "/tmp/fifo"])
    for path in ("/dev/zero", "/tmp/fifo"):
        with pytest.raises((InvalidRequestError, GuestError), match=path):
            box.files.read(path, "bytes")
    assert box.exec("echo fine").stdout == "fine\n"


def test_a_directory_where_a_file_is_meant(box: Sandbox) -> None:
    box.files.mkdir("full/inner")
    for act in (
        lambda: box.files.read("full"),
        lambda: box.files.write("full", "x"),
        lambda: box.files.remove("full"),
        lambda: box.exec(["/home/user/full"]),
        lambda: box.exec("true", cwd="/etc/passwd"),
        lambda: box.files.list("/etc/passwd"),
    ):
        with pytest.raises((InvalidRequestError, GuestError)):
            act()
    assert box.files.stat("full/inner").kind == "directory"


def test_commands_that_are_none(box: Sandbox) -> None:
    for command in ("", "  ", [], [""], "x" * 200_000, ["a\0b"], "echo \0"):
        with pytest.raises(InvalidRequestError):
            box.exec(command)
    with pytest.raises(LLM4AgentsError, match="nobody-there"):
        box.exec("true", user="nobody-there")
    with pytest.raises(LLM4AgentsError, match="/no/where"):
        box.exec("true", cwd="/no/where")


def test_output_that_is_no_text(box: Sandbox) -> None:
    every = bytes(range(256))
    box.files.write("every", every * 300)
    done = box.exec("cat every; cat every >&2")
    assert done.stdout_bytes == done.stderr_bytes == every * 300
    assert len(done.stdout) > 0, "and as text with replacement characters"
    seen: list[str] = []
    box.exec("printf 'caf\\303'; sleep 0.2; printf '\\251'", on_stdout=seen.append)
    assert "".join(seen) == "café", "a character cut in two by the stream is put together"


def test_ids_that_are_none(node: Node) -> None:
    for id in ("sbx_" + "0" * 20, "sbx_x", "..", "a/b", ""):
        with pytest.raises((SandboxNotFoundError, InvalidRequestError)):
            Sandbox.connect(id)


def test_requests_that_are_none(node: Node) -> None:
    for body in ("{", "[]", "null", '{"template": "base", "no_such_field": 1}', '{"vcpus": "one"}'):
        answer = node.http.post("/v1/sandboxes", content=body, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request"), answer.text
    big = node.http.post(
        "/v1/sandboxes", content=b" " * (40 * MIB), headers={"content-type": "application/json"}
    )
    assert (big.status_code, big.json()["code"]) == (413, "too_large")
    assert node.http.get("/v1/no/such").json()["code"] == "not_found"
    assert node.http.patch("/v1/sandboxes").status_code == 405
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(node.run / "server.sock"))
        raw.settimeout(10)
        raw.sendall(os.urandom(4096) + b"\r\n\r\n")
        assert b"400" in raw.recv(4096)
    export = node.http.post("/v1/templates/base/export", json={"file": "relative"})
    assert export.json()["code"] == "invalid_request"
    assert node.call("GET", "/v1/server")["api"] == 1


def test_a_file_far_larger_than_the_server_may_grow(node: Node, box: Sandbox) -> None:
    """In, compared by digest in the guest, and out again. LLM4AGENTS_TEST_BIG=1 makes it 3 GiB."""
    import hashlib

    piece, digest = secrets.token_bytes(MIB), hashlib.sha256()
    before, peak = node.rss(), 0

    def pieces() -> Iterator[bytes]:
        nonlocal peak
        for number in range(BIG // MIB):
            one = number.to_bytes(8, "big") + piece[8:]
            digest.update(one)
            if number % 32 == 0:
                peak = max(peak, node.rss())
            yield one

    assert box.files.write("big", pieces()) == BIG
    assert box.exec("sha256sum big", timeout=0).stdout.split()[0] == digest.hexdigest()
    back = hashlib.sha256()
    with box.files.read("big", "stream") as stream:
        for number, part in enumerate(stream):
            back.update(part)
            if number % 256 == 0:
                peak = max(peak, node.rss())
    assert back.hexdigest() == digest.hexdigest()
    assert peak - before < 64 * MIB, f"the server grew by {(peak - before) / MIB:.0f} MiB"
    box.files.remove("big")
