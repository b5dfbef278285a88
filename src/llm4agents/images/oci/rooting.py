"""From a reference to a root file system in the cache. Not for how layers are read: that is the worker's."""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm4agents.errors import HostSetupError, from_wire
from llm4agents.images import process, trust
from llm4agents.images.cache import Cache, digest_of
from llm4agents.images.oci import manifest, pull, reference
from llm4agents.images.oci.image import Auth, OciConfig, OciRootfs, Registries
from llm4agents.images.overlay import EPOCH, RESOLV_CONF
from llm4agents.images.process import check_room, in_thread
from llm4agents.images.progress import Progress, silent

_BUILDER = 1
PLATFORM = "linux/amd64"
_HOSTS = b"127.0.0.1\tlocalhost sandbox\n::1\tlocalhost ip6-localhost ip6-loopback\n"
_GROWTH = 4
"""How much room is asked for, by the size of the layers as they are kept: they and what they unpack to."""


async def rootfs(
    image: str,
    cache: Cache,
    progress: Progress = silent,
    *,
    registries: Registries | None = None,
    auth: Auth | None = None,
    platform: str = PLATFORM,
    authority: bytes | None = None,
) -> OciRootfs:
    """The root file system of an image, pulled and made if the cache has none of the same content.

    `image`: `HOST/REPOSITORY[:TAG][@DIGEST]`, or `oci:DIR[:TAG]`, `oci-archive:FILE[:TAG]`,
    `docker-archive:FILE[:TAG]` (`is_local`: the operator's alone). A tag is asked for each time; what is found under it
    is made once. `authority`: certificate (PEM) of the node's CA, trusted in it like the host's extra ones. `auth` is
    kept nowhere.

    Raises InvalidRequestError (the reference or the image; says why), NotFoundError, ForbiddenError (credentials),
    HostSetupError (the registry or the network), CapacityError. A cancelled call leaves nothing but whole blobs.
    """
    registries = registries or Registries()
    where = reference.parse(image, registries)
    certificates = await in_thread(lambda _: trust.certificates(authority))
    extra = b"\n".join(data for name, data in certificates.items() if name != trust.AUTHORITY) or None
    progress("pull", f"looking for {where}", 0.0)
    async with pull.opened(where, registries, auth, extra) as source:
        found, config = await source.resolve(platform)
        said = manifest.configuration(manifest.document(config, "configuration"), len(found.layers), platform)
        bundle = await in_thread(lambda _: _bundle())
        key = digest_of(
            {
                "builder": _BUILDER,
                "config": found.config.digest,
                "manifest": found.digest,
                "certificates": {name: data.hex() for name, data in certificates.items()},
                "nss": trust.certutil() is not None,
                "bundle": bundle.hex(),
            }
        )
        async with cache.lock(f"oci-{key[:16]}", progress):
            known = _recall(cache, key, said, found.digest)
            if known is not None:
                return known
            layers = await pull.layers(source, found.layers, cache, progress)
            await _make(cache, progress, key, said, layers, certificates, bundle)
    made = _recall(cache, key, said, found.digest)
    if made is None:
        raise HostSetupError("the image just made is gone from the cache", hint="was it emptied meanwhile?")
    for note in made.notes:
        progress("rootfs", note, None)
    return made


def _bundle() -> bytes:
    """The public authorities this host trusts, for images that trust nobody."""
    try:
        return Path(trust.BUNDLE).read_bytes()
    except OSError:
        return b""


def _recall(cache: Cache, key: str, said: OciConfig, digest: str) -> OciRootfs | None:
    body = cache.recall("oci", key)
    path = cache.blob(body["digest"]) if body else None
    if body is None or path is None:
        return None
    config = replace(said, shell=body["shell"], systemd=body["systemd"])
    packages = tuple((str(name), str(version)) for name, version in body["packages"])
    return OciRootfs(
        path, body["digest"], path.stat().st_size, config, digest, packages, tuple(body["notes"])
    )


async def _make(
    cache: Cache,
    progress: Progress,
    key: str,
    said: OciConfig,
    layers: list[Path],
    certificates: dict[str, bytes],
    bundle: bytes,
) -> None:
    needed = _GROWTH * sum(path.stat().st_size for path in layers)
    async with cache.workdir() as tmp:
        check_room(tmp, needed)
        files = {
            "/etc/resolv.conf": RESOLV_CONF.encode(),
            "/etc/hostname": b"sandbox\n",
            "/etc/hosts": _HOSTS,
            **await trust.browser_files(certificates, cache, tmp),
        }
        job = {
            "layers": [str(path) for path in layers],
            "out": "rootfs.erofs",
            "diffs": list(said.diffs),
            "files": _text(files),
            "certificates": _text(certificates),
            "bundle": base64.b64encode(bundle).decode(),
            "directories": [said.workdir, *said.volumes],
            "argv": [*said.entrypoint, *said.cmd][:1],
            "epoch_ns": EPOCH * 10**9,
        }
        (tmp / "job.json").write_text(json.dumps(job))
        answer = await _worker(tmp, needed, progress)
        progress("rootfs", "checking the image in", 0.97)
        digest, path = await in_thread(lambda cancel: cache.ingest(tmp / "rootfs.erofs", cancel))
        cache.remember("oci", key, {**answer, "digest": digest})
        progress("rootfs", f"{path.stat().st_size / 1e6:.0f} MB", 1.0)


async def _worker(tmp: Path, needed: int, progress: Progress) -> dict[str, Any]:
    def line(text: str) -> None:
        done, _, words = text.partition(" ")
        try:
            progress("rootfs", words[:200], float(done) * 0.95)
        except ValueError:
            return

    argv = [sys.executable, "-m", "llm4agents.images.oci.worker", str(tmp / "job.json")]
    output = await process.run(argv, cwd=tmp, needed_bytes=needed, on_line=line)
    try:
        answer = json.loads(output)
    except ValueError:
        raise HostSetupError("the process that reads images said nothing that can be read") from None
    if "error" in answer:
        raise from_wire(answer["error"], 400)
    return dict(answer)


def _text(files: dict[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(data).decode() for name, data in files.items()}
