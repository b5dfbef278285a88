"""A bundle comes back as it went, small where it was empty; one that was tampered with comes not at all."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm4agents.errors import InvalidRequestError, LLM4AgentsError, NotFoundError, VersionMismatchError
from llm4agents.images import bundle
from llm4agents.images.cache import Cache

MIB = 1 << 20
pytestmark = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="qemu-img is not installed")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "from")


@pytest.fixture
def target(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "to")


@pytest.fixture
def variant(cache: Cache) -> Path:
    """A variant like the engine's: a blob, a memory file of 1 GiB with little in it, a sparse disk."""
    digest, _ = cache.ingest_bytes(b"\x00" * 100_000 + b"kernel")
    path = cache.templates / "base" / "keys" / "k1"
    (path / "snapshot").mkdir(parents=True)
    (path / "template.json").write_text(json.dumps({"name": "base", "key": "k1", "blobs": [digest]}))
    (path / "snapshot" / "manifest.json").write_text('{"identity": {"qemu": "7"}}')
    with (path / "snapshot" / "memory").open("wb") as file:
        file.truncate(1 << 30)
        for at in (0, 77 * MIB + 5, (1 << 30) - 3):
            file.seek(at)
            file.write(b"abc")
        file.seek(500 * MIB)
        file.write(bytes(MIB))  # written, and zero
    with (path / "upper.raw").open("wb") as file:
        file.truncate(64 * MIB)
    (path / "upper.qcow2.empty").write_bytes(b"of this place")
    return path


@pytest.fixture
def packed(variant: Path, cache: Cache, tmp_path: Path) -> Path:
    file = tmp_path / "base.l4a"
    size = asyncio.run(bundle.export(variant, file, cache))
    assert size == file.stat().st_size
    return file


def load(file: Path, cache: Cache, **kwargs: Any) -> bundle.Imported:
    return asyncio.run(bundle.import_(file, cache, **kwargs))


def nothing_came(cache: Cache) -> bool:
    left = [path for path in cache.root.rglob("*") if path.is_file() and cache.locks not in path.parents]
    return left == []


def test_it_comes_back_as_it_went(packed: Path, variant: Path, cache: Cache, target: Cache) -> None:
    assert packed.stat().st_size < 100_000
    imported = load(packed, target)
    assert (imported.name, imported.key) == ("base", "k1")
    assert imported.path == target.templates / "base" / "keys" / "k1"
    for name in ("template.json", "snapshot/manifest.json", "upper.raw"):
        assert (imported.path / name).read_bytes() == (variant / name).read_bytes()
    memory = imported.path / "snapshot" / "memory"
    assert memory.stat().st_size == 1 << 30
    assert memory.stat().st_blocks * 512 < 2 * MIB
    with memory.open("rb") as file:
        for at in (0, 77 * MIB + 5, (1 << 30) - 3):
            file.seek(at)
            assert file.read(3) == b"abc"
        file.seek(500 * MIB)
        assert file.read(MIB) == bytes(MIB)
    digest = imported.template["blobs"][0]
    assert target.blob(digest).read_bytes() == cache.blob(digest).read_bytes()
    assert list(target.tmp.iterdir()) == []


def test_the_overlay_names_the_disk_of_its_new_place(packed: Path, target: Cache) -> None:
    imported = load(packed, target)
    overlay = (imported.path / "upper.qcow2.empty").read_bytes()
    assert str(imported.path / "upper.raw").encode() in overlay[:4096]
    assert str(target.tmp).encode() not in overlay


def test_importing_twice_is_importing_once(packed: Path, target: Cache) -> None:
    first = load(packed, target)
    before = (first.path / "template.json").stat().st_ino
    assert load(packed, target).path == first.path
    assert (first.path / "template.json").stat().st_ino == before


def test_equal_templates_make_equal_bundles(
    packed: Path, variant: Path, cache: Cache, tmp_path: Path
) -> None:
    asyncio.run(bundle.export(variant, tmp_path / "again", cache))
    assert (tmp_path / "again").read_bytes() == packed.read_bytes()


def test_another_hosts_machine_is_refused_before_it_is_here(packed: Path, target: Cache) -> None:
    def check(template: dict[str, Any], snapshot: dict[str, Any]) -> None:
        assert template["name"] == "base"
        raise VersionMismatchError(f"made for QEMU {snapshot['identity']['qemu']}")

    with pytest.raises(VersionMismatchError, match="QEMU 7"):
        load(packed, target, check=check)
    assert nothing_came(target)


def test_no_file_and_no_place_are_said_to_be(
    variant: Path, cache: Cache, target: Cache, tmp_path: Path
) -> None:
    with pytest.raises(NotFoundError):
        load(tmp_path / "none", target)
    with pytest.raises(NotFoundError):
        asyncio.run(bundle.export(variant.parent / "other", tmp_path / "x", cache))
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        asyncio.run(bundle.export(variant, tmp_path / "no" / "x", cache))


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_a_bundle_cut_short_is_refused(packed: Path, target: Cache, part: float) -> None:
    os.truncate(packed, int(packed.stat().st_size * part))
    with pytest.raises(InvalidRequestError, match="not a usable template bundle"):
        load(packed, target)
    assert nothing_came(target)


def test_a_flipped_byte_is_noticed(packed: Path, target: Cache) -> None:
    whole = packed.read_bytes()
    meant = gzip.decompress(whole)
    for at in range(10, len(whole), len(whole) // 20):
        flipped = whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
        try:
            if gzip.decompress(flipped) == meant:  # a run of zeros can be said in two ways
                continue
        except (OSError, EOFError, zlib.error):
            pass
        packed.write_bytes(flipped)
        with pytest.raises((InvalidRequestError, VersionMismatchError)):
            load(packed, target)
        assert nothing_came(target)


def rewrite(
    file: Path, change: Callable[[dict[str, Any], list[tuple[tarfile.TarInfo, bytes]]], None]
) -> None:
    """Unpack, let `change` do harm to manifest and members, pack again with right lengths."""
    with tarfile.open(file) as archive:
        members = [(m, archive.extractfile(m).read()) for m in archive]  # type: ignore[union-attr]
    manifest = json.loads(members.pop(0)[1])
    change(manifest, members)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        text = json.dumps(manifest).encode()
        head = tarfile.TarInfo("bundle.json")
        head.size = len(text)
        archive.addfile(head, io.BytesIO(text))
        for member, data in members:
            archive.addfile(member, io.BytesIO(data) if member.isreg() else None)
    length = out.tell()
    end = out.getvalue().rstrip(b"\0")
    body = end + bytes(-len(end) % 512) + bytes(1024)
    file.write_bytes(gzip.compress(body if len(body) <= length else out.getvalue(), 1))


def _path(new: str) -> Callable[..., None]:
    def change(manifest: dict[str, Any], members: list[Any]) -> None:
        manifest["files"][-1]["path"] = new
        members[-1][0].name = new

    return change


def _set(index: int, **values: Any) -> Callable[..., None]:
    return lambda manifest, members: manifest["files"][index].update(values)


def _twice(manifest: dict[str, Any], members: list[Any]) -> None:
    manifest["files"].append(manifest["files"][-1])
    members.append(members[-1])


def _link(manifest: dict[str, Any], members: list[Any]) -> None:
    members[-1][0].type, members[-1][0].linkname, members[-1][0].size = tarfile.SYMTYPE, "/etc/passwd", 0


def _stray_blob(manifest: dict[str, Any], members: list[Any]) -> None:
    import hashlib

    data = b"stray"
    digest = hashlib.sha256(data).hexdigest()
    entry = {"path": f"blobs/{digest}", "bytes": 5, "sha256": digest, "extents": [[0, 5]], "mode": 0o444}
    manifest["files"].insert(0, entry)
    info = tarfile.TarInfo(f"blobs/{digest}")
    info.size = 5
    members.insert(0, (info, data))


def _no_blob(manifest: dict[str, Any], members: list[Any]) -> None:
    manifest["files"].pop(0)
    members.pop(0)


def _name(**values: str) -> Callable[..., None]:
    return lambda manifest, members: manifest.update(values)


HARM: dict[str, Callable[..., None]] = {
    "traversal": _path("variant/../../../evil"),
    "absolute": _path("/etc/evil"),
    "hidden": _path("variant/.evil"),
    "elsewhere": _path("other/evil"),
    "deep": _path("variant/a/b/c/d"),
    "the overlay": _path("variant/upper.qcow2.empty"),
    "a file as directory": _path("variant/template.json/x"),
    "not a blob's digest": _path("blobs/" + "0" * 64),
    "twice": _twice,
    "link": _link,
    "stray blob": _stray_blob,
    "missing blob": _no_blob,
    "setuid": _set(-1, mode=0o4755),
    "negative size": _set(-1, bytes=-1),
    "vast size": _set(-1, bytes=1 << 62),
    "float size": _set(-1, bytes=1.5),
    "boolean size": _set(-1, bytes=True),
    "overlapping parts": _set(2, extents=[[0, 10], [5, 10]]),
    "parts beyond the end": _set(2, extents=[[1 << 40, 10]]),
    "endless part": _set(2, extents=[[0, 1 << 40]], bytes=1 << 41),
    "no parts": _set(2, extents=7),
    "wrong digest": _set(2, sha256="0" * 64),
    "another name": _name(name="python"),
    "a path as name": _name(name="../x"),
    "a path as key": _name(key="../x"),
    "too many files": lambda manifest, members: manifest.update(files=manifest["files"] * 100),
    "no files": lambda manifest, members: manifest.update(files=[]),
    "missing member": lambda manifest, members: members.pop(),
    "member too many": lambda manifest, members: members.append(members[-1]),
    "members in another order": lambda manifest, members: members.reverse(),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM.keys())
def test_a_bundle_out_to_do_harm_is_refused(packed: Path, target: Cache, tmp_path: Path, harm: Any) -> None:
    rewrite(packed, harm)
    before = sorted(path for path in tmp_path.rglob("*") if target.root not in path.parents)
    with pytest.raises(InvalidRequestError):
        load(packed, target)
    assert nothing_came(target)
    assert sorted(
        path for path in tmp_path.rglob("*") if target.root not in path.parents and path != target.root
    ) == [path for path in before if path != target.root]


def test_a_rewritten_bundle_without_harm_is_taken(packed: Path, target: Cache) -> None:
    rewrite(packed, lambda manifest, members: None)
    assert load(packed, target).name == "base"


def test_another_format_asks_for_another_version(packed: Path, target: Cache) -> None:
    rewrite(packed, lambda manifest, members: manifest.update(format=2))
    with pytest.raises(VersionMismatchError, match="format 2"):
        load(packed, target)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"nonsense", b"[" * 100_000, b'{"format": 1, "name": 5}']
)
def test_a_manifest_of_nonsense_is_refused(text: bytes) -> None:
    with pytest.raises(LLM4AgentsError):
        bundle.parse_manifest(text)


def test_what_is_no_bundle_is_refused(target: Cache, tmp_path: Path) -> None:
    for data in (b"hello", gzip.compress(b"hello"), gzip.compress(bytes(10_000)), b"PK\x03\x04"):
        (tmp_path / "x").write_bytes(data)
        with pytest.raises(InvalidRequestError):
            load(tmp_path / "x", target)
    # Opening a pipe that nobody writes to would have no end.
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(InvalidRequestError, match="is not a file"):
            load(special, target)
    assert nothing_came(target)
