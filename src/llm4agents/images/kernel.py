"""The guest's kernel: the ELF out of the distribution's cloud kernel package, and the modules a guest needs.

No kernel is compiled. What goes into the initramfs with them is `initramfs`.
"""

from __future__ import annotations

import io
import lzma
import re
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from llm4agents.errors import HostSetupError
from llm4agents.images import debian, kmod, vmlinux
from llm4agents.images.cache import Cache, digest_of
from llm4agents.images.process import PATH, Cancel, check_room, in_thread, require, tool
from llm4agents.images.progress import Progress, silent

META_PACKAGE = "linux-image-cloud-amd64"
ROOM_BYTES = 400_000_000
_BUILDER = 1
_MODULE_BYTES_MAX = 67_108_864

Ordered = list[tuple[str, bytes]]
Refuses = Callable[[str], str | None]
"""From a kernel release to why this host's VMM must not run it, or None. The engine has the table."""


@dataclass(frozen=True, slots=True)
class Kernel:
    release: str
    """`uname -r`: 6.1.0-57-cloud-amd64."""
    package: str
    version: str
    vmlinux: Path
    digest: str
    """SHA-256 of the vmlinux."""
    modules: tuple[tuple[str, Path], ...]
    """(name, plain .ko) in load order."""
    nested: tuple[tuple[str, Path], ...] = ()
    """Those on top in a machine that may run machines, in load order after `modules`."""


async def build_kernel(
    cache: Cache,
    progress: Progress = silent,
    *,
    refuses: Refuses = lambda release: None,
    refresh: bool = False,
) -> Kernel:
    """The kernel for this host's guests, from the cache or from apt.

    `refresh` asks apt again and takes its current candidate; otherwise a kernel once chosen stays, since
    another one means that every template is built anew. Raises HostSetupError, CapacityError.
    """
    system = debian.host()
    key = digest_of([_BUILDER, system.codename, system.architecture, kmod.WANTED, kmod.OPTIONAL, kmod.NESTED])
    async with cache.lock(f"kernel-{key[:16]}", progress):
        kernel = None if refresh else _recall(cache, key)
        if kernel is None or refuses(kernel.release):
            kernel = await _fetch(cache, progress, key, refuses)
    return kernel


def _recall(cache: Cache, key: str) -> Kernel | None:
    body = cache.recall("kernel", key)
    if body is None:
        return None
    vmlinux_path = cache.blob(body["vmlinux"])
    modules, nested = (
        tuple((name, path) for name, digest in body[part] if (path := cache.blob(digest)) is not None)
        for part in ("modules", "nested")
    )
    if vmlinux_path is None or (len(modules), len(nested)) != (len(body["modules"]), len(body["nested"])):
        return None
    return Kernel(
        release=body["release"],
        package=body["package"],
        version=body["version"],
        vmlinux=vmlinux_path,
        digest=body["vmlinux"],
        modules=modules,
        nested=nested,
    )


async def _fetch(cache: Cache, progress: Progress, key: str, refuses: Refuses) -> Kernel:
    require(["apt-get", "apt-cache", "dpkg-deb"])
    async with cache.workdir() as tmp:
        check_room(tmp, ROOM_BYTES)
        progress("kernel", "asking apt for the cloud kernel", None)
        name, version = await _resolve(tmp)
        release = name.removeprefix("linux-image-")
        if reason := refuses(release):
            raise HostSetupError(
                f"Linux {release} must not run here: {reason}",
                hint="use the kernel and QEMU of one Debian release (see `llm4agents doctor`)",
            )
        fields = await debian.show(name, tmp)
        megabytes = int(fields.get("Size", "0")) / 1e6
        progress("kernel", f"downloading {name} {version} ({megabytes:.1f} MB)", None)
        debs = [await debian.download(name, version, tmp)]
        # Some releases keep the modules, or the binary, in a package of their own.
        for part in re.findall(r"\blinux-(?:modules|binary)-[^ ,|]+", fields.get("Depends", "")):
            debs.append(await debian.download(part, (await debian.show(part, tmp))["Version"], tmp))
        progress("kernel", "taking kernel and modules out of the package", None)
        image, *orders = await in_thread(lambda cancel: _unpack(debs, release, cancel))
        elf = await in_thread(lambda _: vmlinux.extract(image))
        modules, nested = ([(name, cache.ingest_bytes(data)[0]) for name, data in order] for order in orders)
        digest, _ = await in_thread(lambda _: cache.ingest_bytes(elf))
        body = {
            "release": release,
            "package": name,
            "version": version,
            "vmlinux": digest,
            "modules": modules,
            "nested": nested,
        }
        cache.remember("kernel", key, body)
    kernel = _recall(cache, key)
    assert kernel is not None
    progress("kernel", f"Linux {release}, {len(kernel.modules)} modules", 1.0)
    return kernel


async def _resolve(tmp: Path) -> tuple[str, str]:
    """The versioned package behind the meta package: (name, version)."""
    fields = await debian.show(META_PACKAGE, tmp)
    found = re.search(r"(linux-image-\d[^ ,(]*) *(?:\(= *([^)]+)\))?", fields.get("Depends", ""))
    if found is None:
        raise HostSetupError(f"{META_PACKAGE} {fields['Version']} depends on no kernel image")
    name = found[1]
    return name, found[2] or (await debian.show(name, tmp))["Version"]


def _unpack(debs: list[Path], release: str, cancel: Cancel) -> tuple[bytes, Ordered, Ordered]:
    """The bzImage, the modules' (name, plain .ko) in load order, and those a nested machine has on top."""
    image = b""
    builtin = ""
    files: dict[str, bytes] = {}
    names = {kmod.canonical(name) for name in (*kmod.WANTED, *kmod.OPTIONAL, *kmod.NESTED)}
    for path, data in (member for deb in debs for member in _members(deb, release, cancel)):
        if path == f"boot/vmlinuz-{release}":
            image = data
        elif path.endswith("/modules.builtin"):
            builtin = data.decode()
        elif re.search(r"\.ko(\.xz|\.gz|\.zst)?$", path):
            files[path] = data
    if not image:
        raise HostSetupError(f"{debs[0].name} has no boot/vmlinuz-{release}")
    by_name = {kmod.canonical(path): path for path in files}
    plain: dict[str, bytes] = {}
    modules: dict[str, kmod.Module] = {}
    todo = [name for name in names if name in by_name]
    while todo:  # only what is reached is decompressed: a package has thousands
        name = todo.pop()
        if name in modules:
            continue
        cancel.check()
        path = by_name[name]
        plain[name] = _plain(path, files[path])
        modules[name] = kmod.Module(name, path, kmod.depends_of(kmod.modinfo(plain[name])))
        todo += [dependency for dependency in modules[name].depends if dependency in by_name]
    compiled_in = kmod.builtin_names(builtin)
    order = kmod.load_order(kmod.WANTED, kmod.OPTIONAL, modules, compiled_in)
    loaded = compiled_in | {module.name for module in order}
    # A kernel that lacks some still makes every other machine.
    on_top = kmod.load_order([name for name in kmod.NESTED if name in modules], (), modules, loaded)
    every, nested = ([(module.name, plain[module.name]) for module in part] for part in (order, on_top))
    return image, every, nested


def _members(deb: Path, release: str, cancel: Cancel) -> list[tuple[str, bytes]]:
    """The files of a kernel package that matter, by path; streamed through dpkg-deb."""
    found: list[tuple[str, bytes]] = []
    command = [tool("dpkg-deb"), "--fsys-tarfile", str(deb)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PATH": PATH}
    ) as process:
        assert process.stdout is not None
        try:
            found.extend(_relevant(process.stdout, release, cancel))
        except tarfile.TarError as error:
            raise HostSetupError(f"{deb.name} could not be read: {error}") from error
        finally:
            process.stdout.close()
            if process.poll() is None:
                process.terminate()
    return found


def _relevant(stream: IO[bytes], release: str, cancel: Cancel) -> list[tuple[str, bytes]]:
    keep = re.compile(rf"(usr/)?(boot/vmlinuz-|lib/modules/){re.escape(release)}")
    found = []
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            cancel.check()
            path = member.name.removeprefix("./")
            if member.isfile() and keep.match(path) and member.size <= _MODULE_BYTES_MAX:
                data = archive.extractfile(member)
                assert data is not None
                found.append((path.removeprefix("usr/"), data.read()))
    return found


def _plain(path: str, data: bytes) -> bytes:
    if path.endswith(".ko"):
        return data
    if path.endswith(".xz"):
        return lzma.LZMADecompressor().decompress(data, _MODULE_BYTES_MAX)
    if path.endswith(".gz"):
        import gzip

        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            return file.read(_MODULE_BYTES_MAX)
    raise HostSetupError(f"{path}: modules compressed this way are not supported")
