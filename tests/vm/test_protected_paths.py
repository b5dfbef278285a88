"""Protected paths against real guests: what is left out of every copy, and says so."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters, stdio_client

from llm4agents import (
    ConflictError,
    GuestError,
    InvalidRequestError,
    PathNotFoundError,
    ProtectedPathError,
    Sandbox,
)
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
        again = cli(node, "cp", "--allow-protected", f"{box.id}:t", "t2", cwd=tmp_path)
        assert again.returncode == 5 and "no way around" in again.stderr, again
        assert "hint: --allow-protected" not in again.stderr
        assert "protected_path_refused" in cli(node, "console", box.id, cwd=tmp_path).stdout


# -- inside -------------------------------------------------------------------------------------------------

MAKE = """
mkdir -p project/tests/unit other && echo 'assert True' >project/tests/unit/test_a.py && echo keep >project/data
ln -s unit/test_a.py project/tests/link && echo single >notes && chmod 755 project/tests/unit/test_a.py
ln -s project/tests shortcut
echo 'exit(syscall(165, $ARGV[0], $ARGV[1], "", $ARGV[2] + 0, 0) == 0 ? 0 : 1)' >mount
echo 'exit(syscall(166, $ARGV[1], $ARGV[0] + 0) == 0 ? 0 : 1)' >umount
"""
ATTACKS = [
    "echo x >project/tests/unit/test_a.py",
    "echo x >project/tests/new",
    "rm -rf project/tests/unit",
    "rm -rf project/tests",
    "mv project/tests elsewhere",
    "mv project elsewhere && mkdir -p project/tests",
    "cd project && mv tests ../t2",
    "chmod 777 project/tests",
    "chmod 600 project/tests/unit/test_a.py",
    "ln -f project/data project/tests/unit/test_a.py",
    "mv project/data project/tests/unit/test_a.py",
    "touch -d 2001-01-01 project/tests/unit/test_a.py",
    "truncate -s 0 project/tests/unit/test_a.py",
    "echo x >notes",
    "rm -f notes",
    "mv notes n2",
    "mv project/data notes",
    "perl ~/umount 0 ~/project/tests",
    "perl ~/mount ~/other ~/project/tests 4096",
    # As root of a namespace of its own, which an ordinary user can be.
    "unshare -rm perl ~/umount 0 ~/project/tests",
    "unshare -rm sh -c 'perl ~/umount 2 ~/project/tests; rm -rf ~/project/tests'",
    "unshare -rm sh -c 'perl ~/umount 2 ~/project; rm -rf ~/project/tests; mv ~/project ~/elsewhere'",
    "unshare -rm sh -c 'perl ~/mount ~ /mnt 4096; rm -rf /mnt/project/tests'",
    "unshare -rm sh -c 'perl ~/mount ~ /mnt 20480; perl ~/umount 2 /mnt/project/tests; rm -rf /mnt/project/tests'",
    "unshare -rm perl ~/mount none ~/project/tests 4128; echo x >project/tests/new",
    "unshare -rm sh -c 'perl ~/mount ~/other ~/project 4096; mv ~/project ~/elsewhere'",
]


WITH_TOOLS = next(at for at, attack in enumerate(ATTACKS) if "perl" in attack)


def state(box: Sandbox) -> str:
    looks = "find project/tests notes -printf '%p %y %m %u %TY %l\\n' | sort && cat project/tests/link notes"
    done = box.exec(f"cd /home/user && {looks}")
    return f"{done.exit_code}\n{done.stdout}"


@pytest.fixture(scope="module")
def made(sdk: Node) -> Iterator[str]:
    """A template with something to protect."""
    name = f"protect-{os.getpid()}"
    with Sandbox("base", memory_mib=256) as box:
        assert box.exec(MAKE).exit_code == 0
        box.snapshot(name)
    yield name
    assert sdk.http.delete(f"/v1/templates/{name}").status_code == 200


WANTED = ("project/tests", "notes")


def test_ordinary_code_cannot_change_what_is_protected(made: str) -> None:
    with Sandbox(made, memory_mib=256) as free:
        before = state(free)
        assert (
            before.startswith("0\n")
            and free.exec("mkdir /tmp/k && cp -a project notes /tmp/k").exit_code == 0
        )
        for attack in ATTACKS[:WITH_TOOLS]:
            free.exec(attack)
            assert state(free) != before, attack
            assert free.exec("rm -rf project notes elsewhere t2 n2; cp -a /tmp/k/. .").exit_code == 0
            assert state(free) == before
    with Sandbox(made, memory_mib=256, protect=WANTED) as box:
        assert box.info().protect == ["/home/user/notes", "/home/user/project/tests"]
        assert state(box) == before
        for attack in ATTACKS:
            box.exec(attack)
            assert state(box) == before, attack
        with pytest.raises(GuestError):
            box.files.write("project/tests/unit/test_a.py", "x")
        with pytest.raises(GuestError):
            box.files.write("notes", "x", user="root")
        # What lies beside it is as free as ever.
        free = "cd project && echo more >>data && mkdir new && mv data new/ && cat new/data && rm -r new"
        done = box.exec(f"{free} && echo 1 >../x")
        assert (done.exit_code, done.stdout) == (0, "keep\nmore\n"), done.stderr
        # Root may: it is its kernel. The image on the host stays what it was.
        root = box.exec(
            "blockdev --setrw /dev/vdc && dd if=/dev/zero of=/dev/vdc bs=4096 count=8 conv=fsync"
            " && perl umount 0 /home/user/notes && echo mine >notes",
            cwd="/home/user",
            user="root",
        )
        assert root.exit_code == 0, root.stderr
        assert box.files.read("notes") == "mine\n"
    with Sandbox(made, memory_mib=256, protect=WANTED) as again:
        assert state(again) == before


def test_it_survives_pause_resume_cold_resume_and_fork(made: str) -> None:
    with Sandbox(made, memory_mib=256, protect=WANTED) as box:
        before = state(box)

        def holds(of: Sandbox) -> None:
            for attack in ATTACKS[:8]:
                of.exec(attack)
            assert state(of) == before

        box.pause()
        box.resume()
        holds(box)
        (child,) = box.fork(1)
        with child:
            holds(child)
            assert child.info().protect == box.info().protect
            child.pause()
            child.resume(cold=True)
            holds(child)
        holds(box)
        with pytest.raises(ConflictError, match="protected paths"):
            box.snapshot("never")


def test_over_a_server_that_dies(nodes: Callable[..., Node], made: str) -> None:
    node = nodes().start()
    id = node.create(made, memory_mib=256, protect=["project/tests"])
    node.kill9()
    node.start()
    with sdk_of(node):
        box = Sandbox.connect(id)
        assert box.exec("echo x >project/tests/unit/test_a.py").exit_code != 0
        box.kill()


def test_what_cannot_be_protected_is_said(sdk: Node, made: str, tmp_path: Path) -> None:
    for paths, error, words in (
        (["no/such"], PathNotFoundError, "has no /home/user/no"),
        (["shortcut"], InvalidRequestError, "project/tests"),
        (["notes/x"], InvalidRequestError, "neither"),
        (["/proc/sys"], InvalidRequestError, "not possible"),
        (["/"], InvalidRequestError, "not possible"),
        (["../x"], InvalidRequestError, "absolute"),
        ("tests", InvalidRequestError, "no list"),
    ):
        with pytest.raises(error, match=words):
            Sandbox(made, memory_mib=256, protect=paths)  # type: ignore[arg-type]
    running = sdk.call("GET", "/v1/sandboxes?state=running")["data"]
    assert not [found for found in running if found["template"] == made]
    done = cli(
        sdk,
        "run",
        "-t",
        made,
        "--memory-mib",
        "256",
        "--protect",
        "notes",
        "-l",
        "bash",
        "-c",
        "echo x >notes; cat notes",
        cwd=tmp_path,
    )
    assert done.stdout == "single\n", done.stderr


def test_the_hosts_file_of_a_template(sdk: Node) -> None:
    with Sandbox("base", memory_mib=256, protect=["/etc/hosts", "/usr/bin/env"]) as box:
        assert box.info().protect == ["/etc/hosts", "/usr/bin/env"]
        assert box.exec("echo 1.2.3.4 x >>/etc/hosts", user="root").exit_code != 0
        assert "localhost" in box.files.read("/etc/hosts")
        assert box.exec("env true").exit_code == 0
