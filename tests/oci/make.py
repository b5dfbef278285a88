"""Images made by the tests themselves, as OCI layouts on disk: good ones, and such as no tool would make."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


def sha(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@dataclass
class Entry:
    """One member of a layer: a file unless it says otherwise."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: float = 1_700_000_000
    records: dict[str, str] = field(default_factory=dict)
    major: int = 0
    minor: int = 0


def folder(name: str, mode: int = 0o755, **more: Any) -> Entry:
    return Entry(name, kind=tarfile.DIRTYPE, mode=mode, **more)


def link(name: str, target: str) -> Entry:
    return Entry(name, kind=tarfile.SYMTYPE, link=target)


def hard(name: str, target: str) -> Entry:
    return Entry(name, kind=tarfile.LNKTYPE, link=target)


def layer(*entries: Entry, form: int = tarfile.PAX_FORMAT) -> bytes:
    """A layer's tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.type, info.linkname, info.mode = entry.kind, entry.link, entry.mode
            info.uid, info.gid, info.mtime, info.size = entry.uid, entry.gid, entry.mtime, len(entry.data)
            info.devmajor, info.devminor, info.pax_headers = entry.major, entry.minor, dict(entry.records)
            archive.addfile(info, io.BytesIO(entry.data))
    return out.getvalue()


def packed(tar: bytes) -> bytes:
    return gzip.compress(tar, 1, mtime=0)


class Layout:
    """An OCI layout in a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "blobs/sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self._manifests: list[dict[str, Any]] = []

    def blob(self, data: bytes, kind: str) -> dict[str, Any]:
        digest = sha(data)
        self.where(digest).write_bytes(data)
        return {"mediaType": kind, "digest": digest, "size": len(data)}

    def where(self, digest: str) -> Path:
        return self.path / "blobs/sha256" / digest.removeprefix("sha256:")

    def document(self, body: dict[str, Any], kind: str) -> dict[str, Any]:
        return self.blob(json.dumps(body).encode(), kind)

    def manifest(
        self,
        layers: Sequence[bytes],
        config: dict[str, Any] | None = None,
        *,
        how: str = "gzip",
        architecture: str = "amd64",
        **more: Any,
    ) -> dict[str, Any]:
        """The descriptor of an image of these layers' tars. `how`: `gzip`, `tar`, or `raw` (given as they are kept)."""
        kinds = {"gzip": f"{LAYER}+gzip", "tar": LAYER, "zstd": f"{LAYER}+zstd"}
        diffs = more.pop("diffs", None) or [sha(tar) for tar in layers]
        kept = more.pop("kept", None) or [packed(tar) if how == "gzip" else tar for tar in layers]
        image = {
            "architecture": architecture,
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": diffs},
            "config": config or {},
            **more,
        }
        return self.document(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": self.document(image, CONFIG),
                "layers": [self.blob(data, kinds[how]) for data in kept],
            },
            MANIFEST,
        )

    def tag(self, descriptor: dict[str, Any], tag: str = "t") -> str:
        """Name it; the reference of it on disk."""
        self._manifests.append({**descriptor, "annotations": {"org.opencontainers.image.ref.name": tag}})
        index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": self._manifests}
        (self.path / "index.json").write_text(json.dumps(index))
        return f"oci:{self.path}:{tag}"

    def image(self, *layers: bytes, tag: str = "t", config: dict[str, Any] | None = None, **more: Any) -> str:
        return self.tag(self.manifest(layers, config, **more), tag)

    def index(self, *manifests: tuple[dict[str, Any], str], tag: str = "t") -> str:
        """A list of images, each with its architecture."""
        entries = [
            {**descriptor, "platform": {"os": "linux", "architecture": architecture}}
            for descriptor, architecture in manifests
        ]
        return self.tag(
            self.document({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}, INDEX), tag
        )
