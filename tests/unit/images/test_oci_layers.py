"""Layers as trees: whiteouts, links, what leads outside, holes, bombs; and what is added for a sandbox."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tarfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm4agents import limits
from llm4agents.errors import CapacityError, InvalidRequestError, LLM4AgentsError
from llm4agents.images import erofs
from llm4agents.images.erofs import Inode
from llm4agents.images.oci import fitting, members, unpack
from llm4agents.images.oci.layout import Layout
from llm4agents.images.oci.reference import Local
from llm4agents.images.oci.tree import Tree, split
from tests.oci.make import Entry, folder, hard, layer, link, packed

FORMS = (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)


class Merged:
    """Layers put upon each other."""

    def __init__(self, *tars: bytes) -> None:
        self.tree = Tree()
        self.spools = [io.BytesIO(tar) for tar in tars]
        for number, spool in enumerate(self.spools):
            tar = members.read(spool, len(tars[number]), f"layer {number + 1}")
            self.tree.add_layer(tar, number + 1, number)

    def read(self, inode: Inode) -> bytes:
        return erofs.content(inode, self.spools, 0, inode.size)

    def __getitem__(self, path: str) -> Inode:
        found = self.tree.find(split(path), follow=False)
        assert found is not None, path
        return found

    def text(self, path: str) -> bytes:
        return self.read(self[path])

    def names(self) -> set[str]:
        found, todo = set(), [("", self.tree.root)]
        while todo:
            path, inode = todo.pop()
            for name, child in inode.children.items():
                found.add(f"{path}/{os.fsdecode(name)}")
                todo.append((f"{path}/{os.fsdecode(name)}", child))
        return found


def file(name: str, data: bytes = b"x", **more: object) -> Entry:
    return Entry(name, data, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_is_what_its_tar_has(form: int) -> None:
    long = "/".join(["d" * 90] * 4)
    one = Merged(
        layer(
            folder("./", 0o700, uid=5),
            folder("a/", 0o1777),
            file("./a/f", b"hello", mode=0o4755, uid=70_000, gid=3_000_000),
            file(f"{long}/f", b"deep"),
            link("l", "t" * 200),
            hard("a/h", "./a/f"),
            Entry("p", kind=tarfile.FIFOTYPE),
            file("/abs", b"root"),
            form=form,
        )
    )
    assert (one.tree.root.mode, one.tree.root.uid) == (stat.S_IFDIR | 0o700, 5)
    assert one["a"].mode == stat.S_IFDIR | 0o1777
    assert one.text("a/f") == b"hello" and one["a/f"].mode == stat.S_IFREG | 0o4755
    assert (one["a/f"].uid, one["a/f"].gid, one["a/f"].mtime_ns) == (70_000, 3_000_000, 17 * 10**17)
    assert one["a/h"] is one["a/f"] and one.text(f"{long}/f") == b"deep"
    assert one["l"].target == b"t" * 200 and stat.S_ISFIFO(one["p"].mode) and one.text("abs") == b"root"


def test_whiteouts_are_about_the_layers_below() -> None:
    below = layer(file("a/one"), file("a/two"), file("b/one"), file("c/one"), file("keep"), file("d"))
    above = layer(
        file("b/new", b"new"),
        file("a/.wh.one", b""),
        file("b/.wh..wh..opq", b""),
        file(".wh.c", b""),
        file("c/fresh", b"fresh"),
        file(".wh.nothing", b""),
        file(".wh..wh.aufs", b""),
        folder(".wh..wh.plnk"),
        file(".wh..wh.plnk/1.2", b""),
        file("d", b"new d"),
        file(".wh.d", b""),
    )
    assert Merged(below, above).names() == {
        *("/a", "/a/two", "/b", "/b/new", "/c", "/c/fresh", "/keep", "/d"),
    }
    assert Merged(below, above).text("d") == b"new d"
    for name in (".wh.", "a/.wh..", "a/.wh..."):
        with pytest.raises(InvalidRequestError, match="whiteout of nothing"):
            Merged(below, layer(file(name)))
    with pytest.raises(InvalidRequestError, match="below a whiteout"):
        Merged(below, layer(file(".wh.a/b")))


def test_later_layers_replace_what_is_there() -> None:
    two = Merged(
        layer(
            file("f", b"1"),
            hard("g", "f"),
            folder("d", 0o755),
            file("d/x"),
            file("was-file"),
            folder("was-dir"),
        ),
        layer(
            file("f", b"2"),
            folder("d", 0o700),
            folder("was-file"),
            file("was-dir", b"file"),
            hard("h", "g"),
        ),
    )
    assert (two.text("f"), two.text("g"), two.text("h")) == (b"2", b"1", b"1")
    assert two["d"].mode == stat.S_IFDIR | 0o700 and "/d/x" in two.names()
    assert two["was-file"].directory and two.text("was-dir") == b"file"


def test_links_lead_within_the_tree_whatever_is_written_through_them() -> None:
    home = Path(__file__)
    two = Merged(
        layer(link("out", "/"), link("up", "../../../.."), link("etc2", f"{home.parent}"), folder("etc")),
        layer(
            file("out/etc/passwd", b"mine"),
            file("up/etc/group", b"mine"),
            file(f"etc2/{home.name}", b"mine"),
            file("up/.wh.nothing"),
        ),
    )
    assert two.text("etc/passwd") == two.text("etc/group") == b"mine"
    assert two.text(str(home)) == b"mine" and home.read_bytes() != b"mine"
    with pytest.raises(InvalidRequestError, match="below what is no directory"):
        Merged(layer(link("a", "b"), link("b", "a"), file("a/x")))
    with pytest.raises(InvalidRequestError, match="below what is no directory"):
        Merged(layer(file("a"), file("a/x")))


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (file("../x"), "leads out of it"),
        (file("a/../../x"), "leads out of it"),
        (file("/../x"), "leads out of it"),
        (Entry("dev/sda", kind=tarfile.BLKTYPE, major=8), "has a device, dev/sda"),
        (Entry("dev/null", kind=tarfile.CHRTYPE, major=1, minor=3), "has a device, dev/null"),
        (hard("h", "nothing"), "no file of it"),
        (hard("h", "../../etc/passwd"), "no file of it"),
        (hard("h", "d"), "no file of it"),
        (file("n" * 256), "more than 255 bytes"),
        (file("d/" * (limits.OCI_DEPTH_MAX + 1) + "x"), "too long or too deep"),
        (link("l", "t" * 5_000), "link to no path"),
        (Entry("s", kind=b"V"), "strange kind"),
        (file(".", b""), "a root that is no directory"),
        (file("x", records={"size": "-1"}), "no sane size"),
        (file("x", records={"mtime": "soon"}), "no sane time"),
        (file("x", records={"SCHILY.xattr.user.a": "b" * limits.OCI_HEADER_BYTES_MAX}), "too much of itself"),
    ],
)
def test_what_has_no_place_in_an_image_is_refused(entry: Entry, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        Merged(layer(folder("d"), entry))


def test_extended_attributes_that_a_guest_may_have() -> None:
    capability = "\x01\0\0\x02\x02\0\0\0" + "\0" * 12
    one = Merged(
        layer(
            file(
                "f",
                records={
                    "SCHILY.xattr.security.capability": capability,
                    "SCHILY.xattr.user.note": "hi",
                    "SCHILY.xattr.trusted.overlay.redirect": "/etc",
                    "SCHILY.xattr.security.selinux": "u:r:t",
                },
            )
        )
    )
    assert one["f"].attributes == {b"security.capability": capability.encode("latin-1"), b"user.note": b"hi"}
    assert len(one.tree.notes) == 2 and "trusted.overlay.redirect is left out" in " ".join(one.tree.notes)


@pytest.mark.parametrize(
    "how",
    [
        ("--format=gnu",),
        ("--format=posix", "--sparse-version=0.0"),
        ("--format=posix", "--sparse-version=0.1"),
        ("--format=posix", "--sparse-version=1.0"),
    ],
)
def test_files_with_holes(tmp_path: Path, how: tuple[str, ...]) -> None:
    with (tmp_path / "holes").open("wb") as out:
        for at in range(40):
            out.seek(at * 65_536)
            out.write(b"%06d" % at)
        out.truncate(3_000_000)
    (tmp_path / "after").write_bytes(b"after")
    command = ["tar", "-S", *how, "-C", str(tmp_path), "-cf", "-", "holes", "after"]
    tar = subprocess.run(command, check=True, capture_output=True).stdout
    assert len(tar) < 400_000
    one = Merged(tar)
    assert one["holes"].extents and one.text("holes") == (tmp_path / "holes").read_bytes()
    assert one.text("after") == b"after"
    # In an image too, by the tool that others read it with.
    with (tmp_path / "image").open("w+b") as image:
        erofs.write(one.tree.root, one.spools, image, uuid=bytes(16), label=b"t")
    assert (tmp_path / "image").stat().st_blocks * 512 < 1_000_000
    subprocess.run(
        ["fsck.erofs", f"--extract={tmp_path / 'x'}", str(tmp_path / "image")],
        check=True,
        capture_output=True,
    )
    assert (tmp_path / "x/holes").read_bytes() == (tmp_path / "holes").read_bytes()


def test_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OCI_ENTRIES_MAX", 10)
    with pytest.raises(CapacityError, match="more than 10 files"):
        Merged(layer(*(file(f"f{n}") for n in range(6))), layer(*(file(f"f{n}") for n in range(6))))
    with pytest.raises(CapacityError, match="more than 10 files"):
        Merged(layer(file("d/" * 12 + "x")))
    # As large as it says, not as large as the holes in it are.
    claimed = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 50)}
    with pytest.raises(CapacityError, match="GiB in all"):
        Merged(layer(file("f", b"0\n" + bytes(510), records=claimed)))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 6_000), st.binary(min_size=1, max_size=40), st.integers(0, 8_000))
def test_a_broken_tar_is_an_error_of_ours(at: int, bytes_: bytes, cut: int) -> None:
    whole = bytearray(
        layer(
            folder("d"),
            file("d/f", b"y" * 700, records={"SCHILY.xattr.user.a": "b"}),
            link("l", "d" * 150),
            hard("h", "d/f"),
            file(
                "s",
                b"1\n0\n5\n" + bytes(506) + b"hello",
                records={"GNU.sparse.major": "1", "GNU.sparse.realsize": "9"},
            ),
            form=tarfile.PAX_FORMAT,
        )
    )
    whole[at : at + len(bytes_)] = bytes_
    try:
        one = Merged(bytes(whole[: max(cut, 512)]))
        for path in one.names():
            one.read(one[path])
    except LLM4AgentsError:
        pass


# -- how layers are kept


def unpacked(data: bytes, left: int = 1 << 40) -> bytes:
    out = io.BytesIO()
    unpack.unpack(io.BytesIO(data), out, left, "layer 1")
    return out.getvalue()


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-q", "-c"], input=data, capture_output=True, check=True).stdout


def test_layers_are_unpacked_by_what_they_are() -> None:
    data = os.urandom(3_000_000) + bytes(3_000_000)
    for kept in (
        data,
        packed(data),
        packed(data[:100]) + packed(data[100:]) + bytes(512),
        zstd(data),
        zstd(data[:9]) + zstd(data[9:]),
    ):
        assert unpacked(kept) == data
    for kept in (packed(data), zstd(data)):
        for cut in (20, len(kept) // 2, len(kept) - 1):
            with pytest.raises(InvalidRequestError, match="cut short"):
                unpacked(kept[:cut])
        with pytest.raises(InvalidRequestError, match="broken"):
            unpacked(kept[:1_000] + bytes(1_000) + kept[2_000:])
    with pytest.raises(InvalidRequestError, match="broken gzip"):
        unpacked(packed(data) + b"more")
    with pytest.raises(CapacityError, match="unpack to more than"):
        unpacked(packed(data), 5_000_000)


def test_a_bomb_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "OCI_RATIO_FREE_BYTES", 1 << 20)
    for kept in (packed(bytes(40 << 20)), zstd(bytes(40 << 20))):
        with pytest.raises(InvalidRequestError, match="a bomb"):
            unpacked(kept)


# -- what a sandbox needs


def fitted(
    *entries: Entry, argv: list[str] | None = None, directories: list[str] | None = None
) -> tuple[Merged, fitting.Facts]:
    merged = Merged(layer(*entries))
    facts = fitting.fit(
        merged.tree,
        merged.read,
        files={"/etc/resolv.conf": b"nameserver x\n", "/home/user/.pki/nssdb/key4.db": b"k"},
        certificates={"node.crt": b"-----BEGIN CERTIFICATE-----\nnode\n"},
        bundle=b"-----BEGIN CERTIFICATE-----\npublic\n",
        directories=directories or [],
        argv=argv or [],
        epoch_ns=7,
    )
    return merged, facts


def test_an_image_of_nothing_gets_what_a_sandbox_needs() -> None:
    one, facts = fitted(file("app", b"elf", mode=0o755), directories=["/srv/work"])
    assert facts == (None, False, [])
    assert one.text("etc/passwd") == (
        b"root:x:0:0:root:/root:/sbin/nologin\nuser:*:1000:1000::/home/user:/sbin/nologin\n"
    )
    assert one.text("etc/group") == b"root:x:0:\nuser:x:1000:\n"
    assert (one["home/user"].uid, one["home/user/.pki"].uid, one["home/user/.pki"].mode) == (
        1000,
        1000,
        0o40700,
    )
    assert one["tmp"].mode == 0o41777 and {"/proc", "/sys", "/dev", "/run", "/srv/work"} <= one.names()
    assert one.text("etc/ssl/certs/ca-certificates.crt").count(b"BEGIN") == 2
    assert one.text("usr/local/share/ca-certificates/node.crt")


def test_what_an_image_has_stays() -> None:
    one, facts = fitted(
        file("bin/busybox", mode=0o755),
        link("bin/sh", "busybox"),
        file("etc/passwd", b"root:x:0:0::/root:/bin/sh\nnode:x:1000:1001::/home/node:/bin/sh"),
        file("etc/group", b"root:x:0:\nnode:x:1001:\n"),
        file("etc/shadow", b"root:*:1::::::\n", mode=0o640, gid=42),
        link("etc/ssl/certs", "../pki/certs"),
        file("etc/pki/certs/ca-certificates.crt", b"-----BEGIN CERTIFICATE-----\ntheirs"),
        link("etc/resolv.conf", "../run/systemd/stub"),
        link("run", "var/run"),
        folder("tmp", 0o777),
    )
    assert facts.shell == "/bin/sh"
    assert one.text("etc/passwd").endswith(b"/bin/sh\nuser:x:1000:1001::/home/user:/bin/sh\n")
    assert one.text("etc/group") == b"root:x:0:\nnode:x:1001:\n"
    assert one.text("etc/shadow").endswith(b"user:!:19000:0:99999:7:::\n")
    assert (one["etc/shadow"].mode, one["etc/shadow"].gid) == (stat.S_IFREG | 0o640, 42)
    trusted = one.text("etc/pki/certs/ca-certificates.crt")
    assert b"theirs" in trusted and b"node" in trusted and b"public" not in trusted
    assert one.text("etc/resolv.conf") == b"nameserver x\n" and stat.S_ISREG(one["etc/resolv.conf"].mode)
    assert one["run"].directory and "/run is no directory" in one.tree.notes[0]
    assert one["tmp"].mode == stat.S_IFDIR | 0o777


def test_a_user_of_that_name_is_used() -> None:
    one, _ = fitted(file("etc/passwd", b"user:x:33:44::/srv/me:/bin/x\n"))
    assert one.text("etc/passwd").count(b"user:") == 1 and (one["srv/me"].uid, one["srv/me"].gid) == (33, 44)
    assert "uid 33" in one.tree.notes[0]


def test_links_in_an_image_do_not_lead_what_is_added_elsewhere() -> None:
    """Passwd, certificates and the home may be links: all of it stays in the tree."""
    one, _ = fitted(
        link("etc", "/hidden/etc"),
        link("home", "../../../../var"),
        link("usr", "/"),
    )
    assert one["etc"].directory and b"user:" in one.text("etc/passwd") and one["var/user"].uid == 1000
    one, _ = fitted(file("home"))
    assert one["home/user"].directory and "/home is no directory" in one.tree.notes[0]
    with pytest.raises(InvalidRequestError, match="has a file where"):
        fitted(file("srv"), directories=["/srv/app"])


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (["/sbin/init"], True),
        (["/lib/systemd/systemd"], True),
        (["init"], True),
        (["/bin/init"], False),
        (["x"], False),
    ],
)
def test_systemd_is_known_by_its_file(argv: list[str], found: bool) -> None:
    _, facts = fitted(
        file("usr/lib/systemd/systemd", mode=0o755),
        link("lib", "usr/lib"),
        link("sbin/init", "/lib/systemd/systemd"),
        file("bin/init", mode=0o755),
        argv=argv,
    )
    assert facts.systemd is found


def test_debian_packages_are_told() -> None:
    status = b"Package: a\nStatus: install ok installed\nVersion: 1\n\nPackage: b\nStatus: deinstall ok config-files\n"
    assert fitted(file("var/lib/dpkg/status", status))[1].packages == [("a", "1")]


def _header(kind: bytes, size: int, more: int = 0) -> bytes:
    """A tar header of any size, also one below zero; `more`: that a map of holes goes on."""
    block = bytearray(tarfile.TarInfo("x").tobuf(tarfile.GNU_FORMAT))
    block[156:157] = kind
    block[124:136] = bytes([0o377 if size < 0 else 0o200]) + (size & (1 << 88) - 1).to_bytes(11, "big")
    block[482] = more
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    "data",
    [
        _header(tarfile.REGTYPE, -512),
        _header(tarfile.XHDTYPE, -512),
        _header(tarfile.XHDTYPE, 1 << 40),
        _header(tarfile.GNUTYPE_LONGNAME, 1 << 30),
        _header(tarfile.REGTYPE, 0) + _header(tarfile.XGLTYPE, 1 << 30),
        (_header(tarfile.XHDTYPE, 10) + b"10 a=bcde\n".ljust(512, b"\0")) * 2_000,
        _header(tarfile.GNUTYPE_SPARSE, 0, more=1),
    ],
    ids=["before itself", "pax before itself", "pax", "name", "global", "chain", "holes"],
)
def test_an_archive_that_claims_what_cannot_be_is_refused_and_not_read(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "image.tar"
    with path.open("wb") as file:
        file.write(data)
        if not data[482]:  # of a map of holes what is missing is the point
            file.truncate(len(data) + (3 << 30))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequestError):
            Layout(Local("docker-archive", str(path), None))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
