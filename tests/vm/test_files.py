"""Whole directories through the product: SDK, server, channel, guest. The template is `base`."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llm4agents import (
    AsyncSandbox,
    GuestError,
    InvalidRequestError,
    PathNotFoundError,
    Sandbox,
    TimedOutError,
)
from tests.support import Node, eventually, lines, sdk_of

pytestmark = [pytest.mark.vm, pytest.mark.filterwarnings("ignore::llm4agents.EmulationWarning")]
ODD = os.fsdecode(b"odd \xff\n name")
MIB = 1 << 20


@pytest.fixture(scope="module")
def sdk(shared_node: Node) -> Iterator[Node]:
    with sdk_of(shared_node):
        yield shared_node


@pytest.fixture
def box(sdk: Node) -> Iterator[Sandbox]:
    with Sandbox("base", memory_mib=256) as sandbox:
        yield sandbox


def tree(top: Path) -> Path:
    (top / "dir/deep").mkdir(parents=True)
    (top / "dir/empty").mkdir()
    (top / "dir/deep/data").write_bytes(os.urandom(3 * MIB + 7))
    (top / ODD).write_bytes(b"odd")
    (top / ("long" * 60)).write_bytes(b"")
    (top / "link").symlink_to("dir/deep")
    (top / "dir/dangling").symlink_to("../no/where")
    os.link(top / ODD, top / "dir/other")
    (top / "dir/deep/data").chmod(0o640)
    (top / "dir/deep").chmod(0o750)
    os.utime(top / "dir/deep/data", ns=(0, 1_234_567_890_123_456_789))
    return top


def described(top: Path) -> dict[str, Any]:
    found = {}
    for path in sorted(top.rglob("*")):
        seen = path.lstat()
        what: Any = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        mtime = seen.st_mtime_ns if path.is_file() and not path.is_symlink() else None
        found[str(path.relative_to(top))] = (seen.st_mode, mtime, seen.st_nlink, what)
    return found


def agent_threads(box: Sandbox) -> int:
    return int(box.exec("ls /proc/1/task | wc -l", user="root").stdout)


def test_a_tree_goes_in_and_comes_back_as_it_was(box: Sandbox, tmp_path: Path) -> None:
    here = tree(tmp_path / "here")
    assert box.files.upload(here, "there") == "/home/user/there"
    assert box.exec(
        "cat there/link/data | wc -c; stat -c '%a %h %U' there/dir/deep/data there/dir/other"
    ).stdout == (f"{3 * MIB + 7}\n640 1 user\n644 2 user\n")
    back = box.files.download("there", tmp_path / "back")
    wanted = described(here)
    assert described(back) == wanted
    # Through a plain archive as well, and what tar in the guest makes of it.
    with box.files.tar("there", exclude=["*.none"]) as stream:
        data = b"".join(stream)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert len(archive.getnames()) == len(wanted)
    box.files.untar("again", data)
    assert (
        box.exec("diff -r --no-dereference there again && find again -printf x | wc -c").stdout
        == f"{len(wanted) + 1}\n"
    )
    made = box.exec("tar -c -C there . > made.tar && stat -c %s made.tar")
    assert made.ok, made.stderr
    with box.files.read("made.tar", "stream") as pieces:
        assert box.files.untar("third", pieces) == len(wanted) + 1


def test_archives_that_lead_out_are_refused(box: Sandbox) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        link = tarfile.TarInfo("l")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
        archive.addfile(tarfile.TarInfo("l/passwd"))
    with pytest.raises(InvalidRequestError, match="l/passwd"):
        box.files.untar("in", packed.getvalue(), user="root")
    assert box.exec("test -s /etc/passwd").ok
    with pytest.raises(GuestError, match="denied"):
        box.files.untar("/etc/new", packed.getvalue())


class Zeros:
    """A tar of files of random but repeated bytes, made as it is read; `digest` of the content."""

    def __init__(self, files: int, mib: int) -> None:
        self.block = os.urandom(MIB)
        self.files, self.mib = files, mib

    def __iter__(self) -> Iterator[bytes]:
        for n in range(self.files):
            info = tarfile.TarInfo(f"big{n}")
            info.size = self.mib * MIB
            yield info.tobuf(tarfile.PAX_FORMAT)
            for _ in range(self.mib):
                yield self.block
        yield bytes(1024)

    @property
    def digest(self) -> str:
        sha = hashlib.sha256()
        for _ in range(self.mib):
            sha.update(self.block)
        return sha.hexdigest()


def test_300_mib_stream_through_a_guest_of_256_with_flat_memory(sdk: Node, box: Sandbox) -> None:
    def watching(work: Callable[[], Any]) -> int:
        """The most the server's memory has grown while `work` ran."""
        stop, most, before = threading.Event(), [0], sdk.rss()

        def look() -> None:
            while not stop.wait(0.1):
                most[0] = max(most[0], sdk.rss() - before)

        thread = threading.Thread(target=look)
        thread.start()
        try:
            work()
        finally:
            stop.set()
            thread.join()
        return most[0]

    box.files.untar("warm", Zeros(1, 8))
    source = Zeros(2, 150)
    grown = watching(lambda: box.files.untar("big", source))
    assert grown < 24 * MIB, f"{grown / MIB:.1f} MiB"
    assert box.files.stat("big/big1").size == 150 * MIB
    seen = hashlib.sha256()

    def out() -> None:
        with box.files.tar("big") as stream:
            for piece in stream:
                seen.update(piece)

    grown = watching(out)
    assert grown < 24 * MIB, f"{grown / MIB:.1f} MiB"
    content = box.exec("cat big/big0 | sha256sum; ls -a big | wc -l", timeout=120).stdout.split()
    assert content[0] == source.digest
    assert content[2] == "4"


def test_one_file_larger_than_the_guests_memory(sdk: Node, box: Sandbox, tmp_path: Path) -> None:
    block = os.urandom(MIB)
    before = sdk.rss()
    box.files.write("large", (block for _ in range(300)))
    sha = hashlib.sha256()
    with box.files.read("large", "stream") as stream:
        for piece in stream:
            sha.update(piece)
    assert sha.hexdigest() == hashlib.sha256(block * 300).hexdigest()
    assert sdk.rss() - before < 24 * MIB


def test_watch_sees_what_happens_in_a_new_directory(box: Sandbox) -> None:
    box.files.mkdir("w")
    with box.files.watch("w") as changes:
        box.exec(
            "mkdir w/new && sleep 0.2 && echo 1 > w/new/f && mv w/new/f w/g && rm w/g && chmod 700 w/new"
        )
        seen = []
        for change in changes:
            seen.append((change.event, change.path, change.to, change.kind))
            if change.event == "attributes":
                break
    home = "/home/user/w"
    assert seen == [
        ("created", f"{home}/new", None, "directory"),
        ("created", f"{home}/new/f", None, "file"),
        ("modified", f"{home}/new/f", None, "file"),
        ("moved", f"{home}/new/f", f"{home}/g", "file"),
        ("removed", f"{home}/g", None, "file"),
        ("attributes", f"{home}/new", None, "directory"),
    ]
    with box.files.watch("w") as changes:
        box.files.remove("w", recursive=True)
        assert [change.path for change in changes][-1] == home
    with pytest.raises(PathNotFoundError):
        box.files.watch("w")
    with pytest.raises(GuestError, match="denied"):
        box.files.watch("/root")
    limit = "/proc/sys/fs/inotify/max_user_watches"
    box.exec(
        f"mkdir -p /home/user/many/1 /home/user/many/2 /home/user/many/3; echo 2 | tee {limit}", user="root"
    ).check()
    with pytest.raises(GuestError, match="max_user_watches"):
        box.files.watch("many")


def test_search_by_name_and_by_content(box: Sandbox) -> None:
    box.files.write("p/a.py", "import os\nx = 'Needle'\n")
    box.files.write("p/.b/c.py", "needle\n")
    box.files.write("p/" + ODD, b"needle\0")
    found = box.files.search("p", name="*.py")
    assert sorted((match.path, match.size) for match in found) == [
        ("/home/user/p/.b/c.py", 7),
        ("/home/user/p/a.py", 23),
    ]
    assert [match.path for match in box.files.search("p", name="odd*")] == [f"/home/user/p/{ODD}"]
    found = box.files.search("p", content=r"need\w+", regex=True, ignore_case=True)
    assert sorted((match.line, match.column, match.text) for match in found) == [
        (1, 1, "needle"),
        (2, 6, "x = 'Needle'"),
    ]
    assert len(box.files.search("/etc", max=3)) == 3
    everything = box.files.search("/", content="no such text 8c1", user="root", timeout=200)
    assert (everything.matches, everything.files > 1000) == ([], True)
    with pytest.raises(InvalidRequestError, match="regular expression"):
        box.files.search("p", content="(", regex=True)
    before = agent_threads(box)
    for _ in range(6):
        with pytest.raises(TimedOutError):
            box.files.search("/", content="no such text 8c1", user="root", timeout=0.05)
    assert box.files.stat("p").is_dir
    assert agent_threads(box) <= max(before, 5)


def test_modes_owners_and_links(box: Sandbox) -> None:
    box.files.write("d/f", "x")
    assert box.files.chmod("d", 0o700, recursive=True) == 2
    assert box.files.stat("d/f").mode == 0o700
    assert box.files.chown("d/f", "root", 7) == 1
    assert (box.files.stat("d/f").user, box.files.stat("d/f").gid) == ("root", 7)
    with pytest.raises(GuestError, match="not permitted"):
        box.files.chmod("d/f", 0o777)
    with pytest.raises(InvalidRequestError):
        box.files.chown("d/f", "nobody-here")
    box.files.symlink("d/f", "l")
    assert box.files.stat("l", follow=False).target == "d/f"
    with pytest.raises(GuestError, match="exists"):
        box.files.symlink("x", "l")
    box.files.symlink("d", "l", overwrite=True)
    assert box.files.stat("l").is_dir
    # Names that are not UTF-8 go through JSON, too.
    box.files.write(ODD, "x")
    box.files.move(ODD, "d/" + ODD)
    box.files.chmod("d/" + ODD, 0o600)
    box.files.symlink(ODD, "d/" + ODD + "2")
    assert sorted(entry.name for entry in box.files.list("d")) == ["f", ODD, ODD + "2"]
    box.files.remove("d/" + ODD)


def test_owners_are_kept_on_request(box: Sandbox) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, owner, uid in (("a", "", 7), ("b", "user", 4242), ("c", "nobody-here", 4243)):
            info = tarfile.TarInfo(name)
            info.uname, info.uid, info.mode = owner, uid, 0o4755
            archive.addfile(info)
    box.files.untar("o", packed.getvalue(), preserve_owner=True, user="root")
    assert box.exec("stat -c '%n %u %a' o/*").stdout == "o/a 7 4755\no/b 1000 4755\no/c 4243 4755\n"
    box.files.untar("p", packed.getvalue())
    assert box.exec("stat -c '%n %U %a' p/*").stdout == "p/a user 755\np/b user 755\np/c user 755\n"
    with pytest.raises(GuestError, match="not permitted"):
        box.files.untar("q", packed.getvalue(), preserve_owner=True)


def test_a_full_disk_ends_an_unpacking_and_leaves_no_half_file(box: Sandbox) -> None:
    # /dev/shm is half the guest's memory; what is left of it is made to be 20 MiB.
    free = int(box.exec("df -k --output=avail /dev/shm | tail -1").check().stdout)
    box.exec(f"head -c {(free - 20 * 1024) * 1024} /dev/zero > /dev/shm/fill; mkdir /dev/shm/s").check()
    with pytest.raises(GuestError) as caught:
        box.files.untar("/dev/shm/s", Zeros(3, 9))
    assert caught.value.details["code"] == "no_space"
    assert box.exec("ls -A /dev/shm/s").stdout == "big0\nbig1\n"
    box.exec("rm /dev/shm/fill").check()
    assert box.files.untar("/dev/shm/s", Zeros(3, 9)) == 3


def test_a_client_that_goes_away_leaves_no_half_file_and_no_worker(box: Sandbox, tmp_path: Path) -> None:
    box.exec("mkdir src && head -c 30000000 /dev/urandom > src/f").check()

    def half() -> Iterator[bytes]:
        yield from list(Zeros(1, 9))[:5]
        raise KeyboardInterrupt

    for _ in range(6):  # more than there are workers
        with pytest.raises(KeyboardInterrupt):
            box.files.untar("half", half())
        with box.files.tar("src") as stream:
            next(stream)
        with box.files.watch("src"):
            pass
    eventually(lambda: box.exec("ls -A half").stdout == "", 20)
    assert agent_threads(box) <= 5
    assert box.files.untar("half", Zeros(1, 1)) == 1

    async def cancelled() -> None:
        got = asyncio.Event()
        async with await AsyncSandbox.connect(box.id) as same:
            download = same.files.download("src", tmp_path / "out", on_progress=lambda *_: got.set())
            task = asyncio.create_task(download)
            await got.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    assert box.files.stat("src/f").size == 30_000_000
    asyncio.run(cancelled())  # and the sandbox is killed by leaving it
    assert not list((tmp_path / "out").iterdir())


def test_what_may_not_be_read_is_said_and_the_rest_comes(box: Sandbox, tmp_path: Path) -> None:
    box.exec("mkdir m && echo 1 > m/mine").check()
    box.exec("echo 2 > /home/user/m/roots; chmod 600 /home/user/m/roots", user="root").check()
    with pytest.raises(GuestError, match="m/roots"):
        box.files.download("m", tmp_path / "m")
    assert (tmp_path / "m/mine").read_text() == "1\n"
    box.files.download("m", tmp_path / "all", user="root")
    assert (tmp_path / "all/roots").read_text() == "2\n"


def test_over_http_as_it_is(sdk: Node, box: Sandbox) -> None:
    box.files.write("h/f", "x")
    url = f"/v1/sandboxes/{box.id}/files"
    with sdk.http.stream("GET", f"{url}/watch", params={"path": "/home/user/h"}) as answer:
        changes = lines(answer)
        assert next(changes)["type"] == "watching"
        box.files.write("h/g", "y")
        assert next(changes)["path"].startswith("/home/user/h/.l4-")
        assert any(change["type"] == "moved" and change["to"] == "/home/user/h/g" for change in changes)
    assert sdk.http.get(f"{url}/tar", params={"path": "/home/user/none"}).status_code == 404
    assert sdk.http.get(f"{url}/tar", params={"path": "/home/user/h/f"}).status_code == 400
    assert sdk.http.put(f"{url}/tar", params={"path": "/home/user/h"}, content=b"no tar").status_code == 400
    assert sdk.http.post(f"{url}/attributes", json={"path": "/x"}).status_code == 400
    assert sdk.http.post(f"{url}/search", json={"path": "/", "max": 10**6}).status_code == 400
    got = sdk.http.get(f"{url}/tar", params={"path": "/home/user/h", "exclude": ["f", "x"]})
    with tarfile.open(fileobj=io.BytesIO(got.content)) as archive:
        assert archive.getnames() == ["g"]


def test_on_the_command_line(sdk: Node, box: Sandbox, tmp_path: Path) -> None:
    def cli(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llm4agents", *words]
        return subprocess.run(command, env=sdk.env, capture_output=True, text=True, timeout=60, check=False)

    (tmp_path / "t/d").mkdir(parents=True)
    (tmp_path / "t/d/f").write_text("a needle\n")
    assert cli("cp", "-r", str(tmp_path / "t"), f"{box.id}:t").returncode == 0
    assert cli("find", box.id, "t", "--name", "f").stdout == "/home/user/t/d/f\n"
    assert cli("grep", box.id, "need.e", "t").stdout == "/home/user/t/d/f:1:a needle\n"
    assert cli("grep", box.id, "none", "t").returncode == 1
    assert cli("cp", "-r", f"{box.id}:t", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back/d/f").read_text() == "a needle\n"
    watching = subprocess.Popen(
        [sys.executable, "-m", "llm4agents", "watch", box.id, "t"],
        env=sdk.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert watching.stderr is not None
        assert watching.stdout is not None
        assert watching.stderr.readline() == "watching t\n"
        box.exec("touch t/new")
        assert watching.stdout.readline() == "created /home/user/t/new\n"
    finally:
        watching.terminate()
        watching.communicate()
