"""Manifests, indexes and configurations of images, read from hostile JSON into what is used of them. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from llm4agents import limits
from llm4agents.errors import InvalidRequestError
from llm4agents.images.oci.image import OciConfig

INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
ACCEPT = ", ".join((*MANIFESTS, *INDEXES))
_OLD = "application/vnd.docker.distribution.manifest.v1"
_CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
_LAYERS = re.compile(
    r"application/vnd\.oci\.image\.layer\.v1\.tar(\+gzip|\+zstd)?"
    r"|application/vnd\.docker\.image\.rootfs\.diff\.tar(\.gzip|\.zstd)?"
)
TAR = "application/vnd.oci.image.layer.v1.tar"
_FOREIGN = ("nondistributable", ".foreign.")
_SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
_PORT = re.compile(r"(\d{1,5})(?:/(tcp|udp|sctp))?")


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A blob by its digest (64 hex digits of SHA-256) and its size in bytes."""

    kind: str
    hex: str
    size: int

    @property
    def digest(self) -> str:
        return f"sha256:{self.hex}"


@dataclass(frozen=True, slots=True)
class Manifest:
    digest: str
    config: Descriptor
    layers: tuple[Descriptor, ...]


def refuse(why: str, hint: str | None = None) -> NoReturn:
    """Raises the InvalidRequestError of an image that is not taken."""
    raise InvalidRequestError(f"the image is refused: {why}", hint=hint)


def document(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequestError, as all here do."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        refuse(f"its {what} is no JSON object")
    return found


def descriptor(value: Any, what: str, most: int) -> Descriptor:
    if not isinstance(value, dict):
        refuse(f"its {what} is described by no object")
    digest, size, kind = value.get("digest"), value.get("size"), value.get("mediaType") or ""
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        refuse(f"the digest of its {what} is {str(digest)[:80]!r}, which is no SHA-256")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0 or not isinstance(kind, str):
        refuse(f"its {what} has no sane size or kind")
    if size > most:
        refuse(f"its {what} is {size:,} bytes long; {most:,} is the most")
    return Descriptor(kind, digest.removeprefix("sha256:"), size)


def is_index(data: dict[str, Any], kind: str) -> bool:
    """Whether it is a list of manifests: by its content, whatever the registry called it."""
    said = data.get("mediaType") or kind
    if (isinstance(said, str) and said.startswith(_OLD)) or data.get("schemaVersion") == 1:
        refuse(
            "its manifest is of version 1, which has no digests of its own",
            "push it again with any current tool",
        )
    return said in INDEXES or (said not in MANIFESTS and "manifests" in data)


def choose(index: dict[str, Any], platform: str) -> Descriptor:
    """The manifest for `platform` (`OS/ARCHITECTURE[/VARIANT]`) of an index."""
    entries = index.get("manifests")
    if not isinstance(entries, list) or len(entries) > limits.OCI_INDEX_ENTRIES_MAX:
        refuse("its index lists no manifests, or too many")
    offered = []
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        of = entry.get("platform")
        name = _platform(of) if isinstance(of, dict) else None
        if name is None and len(entries) == 1:
            name = platform  # an index of one need not say
        if name == platform or (name or "").startswith(platform + "/"):
            return descriptor(entry, "manifest", limits.OCI_DOCUMENT_BYTES_MAX)
        if name and not name.startswith("unknown"):
            offered.append(name)
    refuse(
        f"there is none for {platform}; it is for {', '.join(sorted(set(offered))) or 'no platform that it names'}",
        "sandboxes run linux/amd64",
    )


def _platform(of: dict[str, Any]) -> str:
    parts = [str(of.get("os") or "unknown"), str(of.get("architecture") or "unknown")]
    if of.get("variant"):
        parts.append(str(of["variant"]))
    return "/".join(parts)


def manifest(data: dict[str, Any], digest: str) -> Manifest:
    """The manifest of one image."""
    config = descriptor(data.get("config"), "configuration", limits.OCI_DOCUMENT_BYTES_MAX)
    if config.kind and config.kind not in _CONFIGS:
        refuse(f"it is an artifact ({config.kind[:100]}) and no image of a file system")
    layers = data.get("layers")
    if not isinstance(layers, list) or not 0 < len(layers) <= limits.OCI_LAYERS_MAX:
        refuse(f"it has no layers, or more than {limits.OCI_LAYERS_MAX}")
    found = tuple(
        descriptor(layer, f"layer {number}", limits.OCI_LAYER_BYTES_MAX)
        for number, layer in enumerate(layers, 1)
    )
    for number, layer in enumerate(found, 1):
        if any(word in layer.kind for word in _FOREIGN):
            refuse(f"its layer {number} is kept elsewhere than in the registry ({layer.kind})")
        if not _LAYERS.fullmatch(layer.kind):
            refuse(
                f"its layer {number} is of kind {layer.kind[:100] or 'none'}",
                "layers are tar, tar+gzip or tar+zstd; encrypted ones cannot be read",
            )
    if sum(layer.size for layer in found) > limits.OCI_LAYERS_BYTES_MAX:
        refuse(f"its layers are more than {limits.OCI_LAYERS_BYTES_MAX >> 30} GiB together")
    return Manifest(digest, config, found)


def configuration(data: dict[str, Any], layers: int, platform: str) -> OciConfig:
    """What the configuration says. `layers`: how many the manifest has."""
    if (made := _platform(data)) != platform and not made.startswith(platform + "/"):
        refuse(f"it is for {made}, not for {platform}")
    rootfs = data.get("rootfs")
    diffs = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(diffs, list) or not all(isinstance(d, str) and _SHA256.fullmatch(d) for d in diffs):
        refuse("its configuration does not say what its layers are")
    if len(diffs) != layers:
        refuse(f"its configuration tells of {len(diffs)} layers and its manifest of {layers}")
    config = data.get("config") or {}
    if not isinstance(config, dict):
        refuse("its configuration is no object")
    env = {}
    for line in _strings(config.get("Env"), "Env"):
        name, equals, value = line.partition("=")
        if not name or not equals:
            refuse(f"its environment has {line[:80]!r}, which sets nothing")
        env[name] = value
    if sum(len(name) + len(value) for name, value in env.items()) > limits.ENV_BYTES_MAX:
        refuse(f"its environment has more than {limits.ENV_BYTES_MAX} bytes")
    user = config.get("User") or ""
    workdir = config.get("WorkingDir") or "/"
    if not isinstance(user, str) or not isinstance(workdir, str):
        refuse("its user or working directory is no string")
    name, _, group = user.partition(":")
    return OciConfig(
        env=env,
        workdir="/" + workdir.strip("/") if _sane(workdir) else refuse("its working directory is no path"),
        user=name or None,
        group=group or None,
        entrypoint=_strings(config.get("Entrypoint"), "Entrypoint"),
        cmd=_strings(config.get("Cmd"), "Cmd"),
        ports=_ports(_keys(config.get("ExposedPorts"))),
        labels={str(k): str(v) for k, v in _object(config.get("Labels")).items()},
        volumes=tuple(path for path in _keys(config.get("Volumes")) if _sane(path) and path.startswith("/")),
        diffs=tuple(diff.removeprefix("sha256:") for diff in diffs),
    )


def _sane(path: str) -> bool:
    return "\0" not in path and ".." not in path.split("/") and len(path.encode()) < limits.PATH_BYTES_MAX


def _strings(value: Any, what: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) and "\0" not in item for item in value):
        refuse(f"its {what} is no list of strings")
    if sum(len(item) for item in value) > limits.ARGV_BYTES_MAX:
        refuse(f"its {what} has more than {limits.ARGV_BYTES_MAX} bytes")
    return tuple(value)


def _object(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _keys(value: Any) -> list[str]:
    return sorted(key for key in _object(value) if isinstance(key, str))[: limits.OCI_INDEX_ENTRIES_MAX]


def _ports(names: list[str]) -> tuple[int, ...]:
    matches = [_PORT.fullmatch(name) for name in names]
    ports = {int(match[1]) for match in matches if match and match[2] in (None, "tcp")}
    return tuple(sorted(port for port in ports if 0 < port < 65_536))
