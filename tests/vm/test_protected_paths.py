"""Protected paths against real guests: what is left out of every copy, and says so."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters, stdio_client

from llm4agents import ProtectedPathError, Sandbox
from tests.support import Node, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]

PLANT = """
mkdir -p t/.git/hooks t/src t/.vscode t/evil && cd t && echo ok >src/a && echo '#!/bin/sh' >.git/hooks/pre-commit
echo ref: refs/heads/main >.git/HEAD; echo '[core]' >.git/config; echo {} >.vscode/tasks.json; echo x >evil/.BASHRC
ln -s evil .idea; ln .git/config evil/.Npmrc; ln -s ../.git/hooks evil/link; echo 1 >deploy.key
"""
LEFT = {
    ".git/config",
    ".git/hooks",
    ".git/hooks/pre-commit",
    ".vscode/tasks.json",
    "evil/.BASHRC",
    ".idea",
    "evil/.Npmrc",
    "evil/link",
}


def there(top: Path) -> set[str]:
    return {str(path.relative_to(top)) for path in top.rglob("*") if path.is_symlink() or path.is_file()}


@pytest.fixture(scope="module")
def sdk(shared_node: Node) -> Iterator[Node]:
    with sdk_of(shared_node):
        yield shared_node


@pytest.fixture(scope="module")
def box(sdk: Node) -> Iterator[Sandbox]:
    with Sandbox("base", memory_mib=256) as sandbox:
        assert sandbox.exec(PLANT).exit_code == 0
        yield sandbox


def cli(node: Node, *args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llm4agents", *args]
    return subprocess.run(
        command, env=node.env, capture_output=True, text=True, timeout=300, cwd=cwd, check=False
    )


def test_a_download_leaves_them_out_and_names_them(box: Sandbox, tmp_path: Path) -> None:
    done = box.files.download("t", tmp_path / "t")
    assert {found.path for found in done.protected} == LEFT and done.protected_count == len(LEFT)
    assert there(done) == {"src/a", ".git/HEAD", "deploy.key"}
    allowed = box.files.download("t", tmp_path / "all", allow_protected=True)
    assert allowed.protected_count == 0 and LEFT - {".git/hooks"} <= there(allowed)


def test_cp_says_so_and_ends_with_a_status_of_its_own(sdk: Node, box: Sandbox, tmp_path: Path) -> None:
    done = cli(sdk, "cp", f"{box.id}:t", "t", cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert "'.git/hooks/pre-commit': git runs" in done.stderr and "--allow-protected" in done.stderr
    assert there(tmp_path / "t") == {"src/a", ".git/HEAD", "deploy.key"}
    said = json.loads(cli(sdk, "cp", "--json", f"{box.id}:t", "t2", cwd=tmp_path).stdout)
    assert {found["path"] for found in said["protected"]} == LEFT
    one = cli(sdk, "cp", f"{box.id}:t/src/a", ".envrc", cwd=tmp_path)
    assert one.returncode == 5 and ".envrc is protected" in one.stderr and not (tmp_path / ".envrc").exists()
    assert cli(sdk, "cp", "--allow-protected", f"{box.id}:t/src/a", ".envrc", cwd=tmp_path).returncode == 0
    assert (tmp_path / ".envrc").read_text() == "ok\n"


def test_run_with_out(sdk: Node, box: Sandbox, tmp_path: Path) -> None:
    code = "mkdir -p out/d; echo 1 >out/fine; echo 2 >out/.bashrc; echo 3 >out/d/.envrc"
    done = cli(sdk, "run", "--in", box.id, "-l", "bash", "-c", code, "--out", "o", cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    assert "'.bashrc'" in done.stderr and "'d/.envrc'" in done.stderr
    assert there(tmp_path / "o") == {"fine"}


def test_an_agent_is_told_and_has_no_way_around(sdk: Node, box: Sandbox, tmp_path: Path) -> None:
    async def test() -> tuple[str, str]:
        command = ["-m", "llm4agents", "mcp", "--allow-host-paths", str(tmp_path)]
        server = StdioServerParameters(command=sys.executable, args=command, env=sdk.env, cwd="/")
        async with Client(stdio_client(server)) as client:
            said = []
            for path, to in (("t", "t"), ("t/src/a", ".mcp.json")):
                wish = {"path": path, "host_path": to, "sandbox_id": box.id}
                done = await client.call_tool("download", wish)
                said.append(str(done.content[0].text))  # type: ignore[union-attr]
                assert done.is_error == (to == ".mcp.json")
            return said[0], said[1]

    tree, file = asyncio.run(asyncio.wait_for(test(), 120))
    assert "without 8 protected paths" in tree and "'.vscode/tasks.json'" in tree and "ask the user" in tree
    assert "is protected" in file and "ask the user" in file
    assert there(tmp_path) == {"t/src/a", "t/.git/HEAD", "t/deploy.key"}


def test_what_the_operator_protects_leaves_no_sandbox(nodes: Callable[..., Node], tmp_path: Path) -> None:
    node = nodes(LLM4AGENTS_PROTECTED_PATHS="*.key:**/evil:notes.txt").start()
    with sdk_of(node), Sandbox("base", memory_mib=256) as box:
        assert box.exec(PLANT).exit_code == 0
        done = box.files.download("t", tmp_path / "t", allow_protected=True)
        gone = {found.path for found in done.protected}
        assert "/home/user/t/deploy.key" in gone and "/home/user/t/evil/.BASHRC" in gone
        assert "src/a" in there(done) and ".git/hooks/pre-commit" in there(done)
        assert not [path for path in there(done) if "evil" in path or "key" in path]
        for call in (
            lambda: box.files.download("t/deploy.key", tmp_path / "k", allow_protected=True),
            lambda: box.files.read("t/../t//Deploy.KEY"),
            lambda: box.files.download("t/evil", tmp_path / "e"),
            # Another name in the sandbox, but theirs on this machine.
            lambda: box.files.download("t/src/a", tmp_path / "notes.txt", allow_protected=True),
        ):
            with pytest.raises(ProtectedPathError, match="operator"):
                call()
        with box.files.tar("t") as stream:
            raw = b"".join(stream)
        with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
            assert "deploy.key" not in archive.getnames() and "src/a" in archive.getnames()
        logged = (node.state / "logs" / f"{box.id}.jsonl").read_text()
        assert "protected_path_refused" in logged and "protected_paths_left_out" in logged
