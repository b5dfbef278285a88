"""A template's root file system: mmdebstrap → tar, our files over it, → EROFS, read-only and shared by all clones.

Uncompressed on purpose: pages come from the host's page cache, and a guest in emulation pays ten times for
every decompression. What is not here: the kernel, the writable upper, the freeze.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import tarfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from llm4agents.errors import HostSetupError
from llm4agents.images import debian, npm, process, trust, wheels
from llm4agents.images.cache import Cache, digest_of, sha256_file
from llm4agents.images.overlay import DATA, EPOCH, node_files, runner_files, write_overlay
from llm4agents.images.process import Cancel, check_room, in_thread, require
from llm4agents.images.progress import Progress, silent
from llm4agents.images.spec import RUNNER_DIRECTORY, TemplateSpec

_BUILDER = 4
_UUID = "4c344167-656e-7401-8000-000000000001"
_COPYRIGHT_BYTES_MAX = 262_144
_EXCLUDED = ("doc", "man", "info", "locale", "lintian", "bug", "groff", "linda", "doc-base")


@dataclass(frozen=True, slots=True)
class Content:
    """One piece of software in an image, for the record that a template keeps (see NOTICE)."""

    kind: str
    """`debian`, `python` or `npm`."""
    name: str
    version: str
    licence: str | None
    """As the package states it, None where it does not say so in a form programs can read."""


@dataclass(frozen=True, slots=True)
class Rootfs:
    path: Path
    digest: str
    bytes: int
    python: str
    """Version of the release's python3, whether or not the image has it."""
    contents: tuple[Content, ...]


async def build_rootfs(
    spec: TemplateSpec,
    cache: Cache,
    progress: Progress = silent,
    *,
    refresh: bool = False,
    authority: bytes | None = None,
) -> Rootfs:
    """The root file system of `spec`, from the cache or built. Two calls at once, in any process, build once.

    `refresh` builds again, from what the package sources offer today. `authority`: the certificate (PEM) of the node's
    CA, trusted in it like the host's extra ones. Raises HostSetupError (tools, network,
    packages), CapacityError. A cancelled or killed build leaves nothing that looks finished.
    """
    system = debian.host()
    certificates = await in_thread(lambda _: trust.certificates(authority))
    key = await in_thread(lambda _: _key(spec, system, certificates))
    async with cache.lock(f"rootfs-{spec.name}-{key[:16]}", progress):
        found = None if refresh else _recall(cache, key, system)
        if found is not None:
            return found
        await _build(spec, system, cache, progress, key, certificates)
    built = _recall(cache, key, system)
    assert built is not None
    return built


def _key(spec: TemplateSpec, system: debian.Debian, certificates: dict[str, bytes]) -> str:
    lock = _lock(spec, system)
    node = {"node": {name: data.hex() for name, data in node_files().items()}} if spec.node else {}
    return digest_of(
        {
            **node,
            "builder": _BUILDER,
            "codename": system.codename,
            "architecture": system.architecture,
            "spec": spec.rootfs_inputs(),
            "lock": sha256_file(lock) if lock else None,
            "runner": {name: data.hex() for name, data in runner_files().items()} if spec.runner else None,
            "certificates": {name: data.hex() for name, data in certificates.items()},
            "nss": trust.certutil() is not None,
        }
    )


def _lock(spec: TemplateSpec, system: debian.Debian) -> Path | None:
    return DATA / f"{spec.wheels}-{system.python}.lock" if spec.wheels else None


def _recall(cache: Cache, key: str, system: debian.Debian) -> Rootfs | None:
    body = cache.recall("rootfs", key)
    path = cache.blob(body["digest"]) if body else None
    if body is None or path is None:
        return None
    contents = tuple(Content(**item) for item in body["contents"])
    return Rootfs(path, body["digest"], path.stat().st_size, system.python, contents)


async def _build(
    spec: TemplateSpec,
    system: debian.Debian,
    cache: Cache,
    progress: Progress,
    key: str,
    certificates: dict[str, bytes],
) -> None:
    require(["mmdebstrap", "mkfs.erofs", "apt-get", "setpriv", "tar"])
    async with cache.workdir() as tmp:
        check_room(tmp, spec.build_bytes)
        sources = await debian.sources(system, tmp)
        packages: list[Path] = []
        lock = _lock(spec, system)
        if lock is not None:
            (tmp / "wheels").mkdir()
            packages = await wheels.download(lock, system.python, tmp / "wheels", progress)
            progress("wheels", "unpacking Python packages", 0.5)
        archives = await npm.download(spec.npm, tmp, progress) if spec.npm else {}
        browsers = await trust.browser_files(certificates, cache, tmp)
        infos = await in_thread(
            lambda cancel: write_overlay(
                tmp / "overlay.tar",
                spec,
                python=system.python,
                sources=sources,
                wheels=packages,
                archives=archives,
                certificates=certificates,
                browsers=browsers,
                cancel=cancel,
            )
        )
        contents = [Content("python", info.name, info.version, info.licence) for info in infos]
        contents += [Content("npm", one.name, one.version, one.licence) for one in spec.npm]
        await _mmdebstrap(spec, system, sources, tmp, progress)
        contents = [
            *await in_thread(lambda cancel: list(debian_contents(tmp / "root.tar", cancel))),
            *contents,
        ]
        (tmp / "overlay.tar").unlink()
        progress("rootfs", "writing the EROFS image", 0.85)
        await _make_erofs(tmp, spec.build_bytes)
        progress("rootfs", "checking the image in", 0.97)
        digest, path = await in_thread(lambda cancel: cache.ingest(tmp / "rootfs.erofs", cancel))
        cache.remember("rootfs", key, {"digest": digest, "contents": [asdict(item) for item in contents]})
        progress("rootfs", f"{spec.name}: {path.stat().st_size / 1e6:.0f} MB, {len(contents)} packages", 1.0)


async def _mmdebstrap(
    spec: TemplateSpec, system: debian.Debian, sources: list[debian.Source], tmp: Path, progress: Progress
) -> None:
    wanted = spec.packages_for(system.codename)
    argv = [
        "mmdebstrap",
        "--verbose",
        "--variant=apt",
        "--format=tar",
        f"--architectures={system.architecture}",
    ]
    argv += ["--mode=root" if os.geteuid() == 0 else "--mode=unshare", f"--include={','.join(wanted)}"]
    for line in await debian.apt_options(tmp):
        argv.append(f"--aptopt={line}")
    argv.append('--aptopt=APT::Install-Recommends "0";')
    for name in _EXCLUDED:
        argv.append(f"--dpkgopt=path-exclude=/usr/share/{name}/*")
    argv.append("--dpkgopt=force-unsafe-io")
    if any(package.startswith("default-jdk") for package in wanted):
        # Its maintainer scripts link manual pages, and fail where there is no directory for them.
        argv.append('--essential-hook=mkdir -p "$1"/usr/share/man/man1')
    argv.append("--dpkgopt=path-include=/usr/share/doc/*/copyright")
    argv += [f"--customize-hook={hook}" for hook in hooks(spec, system.python, tmp / "overlay.tar")]
    argv += [system.codename, str(tmp / "root.tar"), *(source.line() for source in sources)]
    env = {"SOURCE_DATE_EPOCH": str(EPOCH)}
    if os.geteuid() == 0:
        env["TMPDIR"] = str(tmp)  # an ordinary user's chroot is another uid's, which cannot come in here
    watch = _Watch(spec.name, progress)
    progress("rootfs", f"installing Debian packages for {spec.name}", 0.0)
    await process.run(argv, cwd=tmp, env=env, needed_bytes=spec.build_bytes, on_line=watch.line)


def hooks(spec: TemplateSpec, python: str, overlay: Path) -> list[str]:
    """What mmdebstrap runs when Debian's packages are in: the user, our files, certificates, byte code. Pure."""
    found = [
        'chroot "$1" useradd --create-home --uid 1000 --user-group --shell /bin/bash user',
        f"tar-in {shlex.quote(str(overlay))} /",
        'chroot "$1" update-ca-certificates >/dev/null 2>&1',
        # A data base of certificates in a home directory is its owner's.
        'if [ -d "$1"/home/user/.pki ]; then chroot "$1" chown -R user:user /home/user/.pki; fi',
        'if [ -d "$1"/root/.pki ]; then chmod 700 "$1"/root/.pki "$1"/home/user/.pki; fi',
    ]
    if spec.wheels == "python":
        # As Debian's own certifi: who asks it by name gets the system's list too.
        packages = f"/usr/local/lib/python{python}/dist-packages"
        for bundle in (f"{packages}/certifi/cacert.pem", f"{packages}/pip/_vendor/certifi/cacert.pem"):
            found.append(f'if [ -e "$1{bundle}" ]; then ln -sf {trust.BUNDLE} "$1{bundle}"; fi')
    if any(package in ("python3", "python3-minimal") for package in spec.packages):
        # Installed only to be run in here; the wheels are read by the compiler, not run. Without a time stamp in
        # it byte code stays valid although every file of the image gets the same time.
        trees = f"/usr/lib/python3 /usr/lib/python{python} /usr/local/lib/python{python}/dist-packages"
        if spec.runner:
            trees += f" {RUNNER_DIRECTORY}"
        found += [
            # `cd`: find wants to go back to where it began, which an ordinary user's chroot may not enter.
            'cd "$1/usr/lib" && find . -name __pycache__ -prune -exec rm -rf {} +',
            f'chroot "$1" env PYTHONHASHSEED=0 python3 -m compileall -q -f -j {os.cpu_count() or 1}'
            f" --invalidation-mode unchecked-hash {trees} >/dev/null 2>&1 || true",
            # It guards a distribution's Python from pip; a sandbox's is the agent's own.
            f'rm -f "$1/usr/lib/python{python}/EXTERNALLY-MANAGED"',
        ]
    found.append(
        'rm -rf "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/etc/apt/sources.list.d/*'
        ' "$1"/var/log/* "$1"/var/cache/debconf/*-old "$1"/var/lib/dpkg/*-old "$1"/var/cache/ldconfig/aux-cache'
        ' "$1"/etc/passwd- "$1"/etc/group- "$1"/etc/shadow- "$1"/etc/gshadow- "$1"/boot/*'
    )
    return found


class _Watch:
    """Turns mmdebstrap's lines into progress: it downloads, unpacks and configures each package in turn."""

    def __init__(self, name: str, progress: Progress) -> None:
        self._name = name
        self._progress = progress
        self._total = 0
        self._done = 0

    def line(self, text: str) -> None:
        if match := re.search(r"Need to get ([\d.,]+ ?[kMG]?B)(?:/[^ ]+ [kMG]?B)? of archives", text):
            self._progress("rootfs", f"downloading {match[1]} of Debian packages", None)
        elif match := re.search(r"(\d+) (?:upgraded, (\d+) )?newly installed", text):
            self._total += int(match[2] or match[1])
        elif text.startswith(("Setting up ", "Unpacking ")):
            self._done += 1
            part = min(1.0, self._done / (2 * self._total)) if self._total else 0.5
            self._progress("rootfs", text.split(" (")[0].removesuffix("..."), 0.05 + 0.6 * part)
        elif "running --customize-hook" in text:
            self._progress("rootfs", f"fitting out {self._name}", 0.7)
        elif "creating tarball" in text:
            self._progress("rootfs", "packing the file system", 0.8)


def debian_contents(root_tar: Path, cancel: Cancel | None = None) -> Iterator[Content]:
    """Name, version and licence of every Debian package in an image's tar."""
    status = ""
    copyrights: dict[str, str] = {}
    with tarfile.open(root_tar, "r|") as archive:
        for member in archive:
            if cancel is not None:
                cancel.check()
            path = member.name.removeprefix("./")
            match = re.fullmatch(r"usr/share/doc/([^/]+)/copyright", path)
            if not member.isfile() or (match is None and path != "var/lib/dpkg/status"):
                continue
            file = archive.extractfile(member)
            assert file is not None
            if match is None:
                status = file.read().decode("utf-8", "replace")
            else:
                copyrights[match[1]] = file.read(_COPYRIGHT_BYTES_MAX).decode("utf-8", "replace")
    for stanza in status.split("\n\n"):
        fields = debian.parse_control(stanza)
        if "Package" in fields and fields.get("Status", "").endswith(" installed"):
            name = fields["Package"]
            yield Content("debian", name, fields.get("Version", ""), licence_of(copyrights.get(name, "")))


def licence_of(text: str) -> str | None:
    """The short names of the licences in a machine-readable debian/copyright, or None for one of free form."""
    if not re.match(r"\s*(?:#[^\n]*\n)*\s*Format(?:-Specification)?:", text):
        return None
    names = re.findall(r"(?m)^License:[ \t]*(\S[^\n]*)$", text)
    return ", ".join(dict.fromkeys(name.strip() for name in names)) or None


async def _make_erofs(tmp: Path, needed_bytes: int) -> None:
    """root.tar → rootfs.erofs; root.tar is gone afterwards.

    mkfs.erofs of Debian 13 reads the tar itself. That of Debian 12 wants a directory, whose owners only root,
    or fakeroot's pretence, can set.
    """
    output, archive = tmp / "rootfs.erofs", tmp / "root.tar"
    options = f"-T{EPOCH} -U{_UUID} -x-1 --quiet"
    if await _reads_tar(tmp):
        argv = ["mkfs.erofs", *options.split(), "--tar=f", str(output), str(archive)]
        await process.run(argv, cwd=tmp, needed_bytes=needed_bytes)
        archive.unlink()
        return
    script = (
        "set -e; mkdir root; tar -x --numeric-owner -p -f root.tar -C root; rm root.tar;"
        f" mkfs.erofs {options} rootfs.erofs root; rm -rf root"
    )
    argv = ["sh", "-c", script] if os.geteuid() == 0 else ["fakeroot", "--", "sh", "-c", script]
    await process.run(argv, cwd=tmp, needed_bytes=needed_bytes)


async def _reads_tar(tmp: Path) -> bool:
    help_text = await asyncio.create_subprocess_exec(
        process.tool("mkfs.erofs"),
        "--help",
        cwd=tmp,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await help_text.communicate()
    return b"--tar" in output


def find(contents: tuple[Content, ...], name: str) -> Content:
    """The content of that name. Raises HostSetupError when the image has none."""
    for content in contents:
        if content.name == name:
            return content
    raise HostSetupError(f"the image has no {name}")
