"""Where an image is, from the words people use for it. Pure: nothing is looked up."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llm4agents.errors import InvalidRequestError
from llm4agents.images.oci.image import Registries

_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LOCAL = ("oci", "oci-archive", "docker-archive")
REPOSITORY_CHARACTERS_MAX = 255


@dataclass(frozen=True, slots=True)
class Remote:
    """An image in a registry."""

    host: str
    """As the reference has it, for people and credentials."""
    endpoint: str
    """`HOST[:PORT]` that is spoken to."""
    repository: str
    tag: str | None
    digest: str | None
    plain: bool
    """Whether without TLS."""
    known: bool
    """Whether the operator has named the registry."""

    @property
    def which(self) -> str:
        return self.digest or self.tag or "latest"

    def __str__(self) -> str:
        version = f"@{self.digest}" if self.digest else f":{self.tag or 'latest'}"
        return f"{self.host}/{self.repository}{version}"


@dataclass(frozen=True, slots=True)
class Local:
    """An image on this machine's disk: an OCI layout (directory or tar), or what `docker save` writes."""

    kind: str
    """`oci`, `oci-archive` or `docker-archive`."""
    path: str
    tag: str | None

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}" + (f":{self.tag}" if self.tag else "")


def is_local(text: str) -> bool:
    """Whether the reference names a file of the node, which only its operator may."""
    return text.partition(":")[0] in _LOCAL


def parse(text: str, registries: Registries) -> Remote | Local:
    """What `text` means: `[docker://]HOST[:PORT]/REPOSITORY[:TAG][@DIGEST]`, or `oci:DIR[:TAG]`,
    `oci-archive:FILE[:TAG]`, `docker-archive:FILE[:TAG]`.

    A first part with a dot, a colon, or `localhost`, is a host; without one the node's default registry is meant, if it
    has one. Raises InvalidRequestError that says what is wrong.
    """
    if is_local(text):
        return _local(text)
    rest = text.removeprefix("docker://")
    if "://" in rest:
        raise InvalidRequestError(
            f"{text!r} is no image reference", hint="HOST/REPOSITORY:TAG, without a scheme; or oci:DIRECTORY"
        )
    rest, at, digest = rest.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise InvalidRequestError(f"{digest!r} is no digest", hint="sha256: and 64 hexadecimal digits")
    first, slash, path = rest.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        host = first
    else:
        host, path = "", rest
    repository, colon, tag = path.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise InvalidRequestError(f"{tag!r} is no tag", hint="letters, digits, '.', '_' and '-', 128 at most")
    if not _REPOSITORY.fullmatch(repository) or len(repository) > REPOSITORY_CHARACTERS_MAX:
        raise InvalidRequestError(
            f"{text!r} is no image reference",
            hint="HOST[:PORT]/REPOSITORY[:TAG][@sha256:…], the repository in lower case; or oci:DIRECTORY",
        )
    if not host:
        if registries.default is None:
            raise InvalidRequestError(
                f"{text!r} does not say which registry it is in",
                hint=f"write HOST/{rest}, or set LLM4AGENTS_REGISTRY to the registry that is meant without one",
            )
        return _remote("", registries.default, repository, tag or None, digest or None, registries)
    return _remote(host, "", repository, tag or None, digest or None, registries)


def _remote(
    host: str, default: str, repository: str, tag: str | None, digest: str | None, registries: Registries
) -> Remote:
    where = default or registries.known.get(host, host)
    scheme, found, rest = where.rpartition("://")
    endpoint, _, prefix = rest.partition("/")
    if default and not found and endpoint in registries.known:
        scheme = registries.known[endpoint].rpartition("://")[0]
    # As every client of registries does: what is on this machine itself needs no certificate.
    plain = scheme == "http" or (not scheme and loopback(endpoint))
    known = bool(default) or host in registries.known
    return Remote(host or endpoint, endpoint, f"{prefix}/{repository}".lstrip("/"), tag, digest, plain, known)


def loopback(endpoint: str) -> bool:
    name = re.sub(r":\d+$", "", endpoint).strip("[]")
    return name in ("localhost", "::1") or re.fullmatch(r"127(\.\d{1,3}){3}", name) is not None


def _local(text: str) -> Local:
    kind, _, rest = text.partition(":")
    path, colon, tag = rest.rpartition(":")
    if not colon or "/" in tag:
        path, tag = rest, ""
    if not path or "\0" in path:
        raise InvalidRequestError(f"{text!r} names no file", hint=f"{kind}:PATH, or {kind}:PATH:TAG")
    return Local(kind, path, tag or None)
