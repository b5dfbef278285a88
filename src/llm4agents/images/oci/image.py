"""What an image is to those who use it: where it may come from, whose credentials, what it says of itself. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llm4agents.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Auth:
    """Whom to be at a registry. Sent to that registry, and to the token server it names, and to nobody else."""

    username: str = ""
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    """A bearer token, instead of name and password."""


@dataclass(frozen=True, slots=True)
class Registries:
    """What a node knows of registries. Their names are an operator's to give: none is built in."""

    default: str | None = None
    """`HOST[:PORT][/PREFIX]` of references that name no host (`LLM4AGENTS_REGISTRY`)."""
    known: Mapping[str, str] = field(default_factory=dict)
    """By the host of a reference, where it really is: `[http://]HOST[:PORT][/PREFIX]`. A known one may lie at a
    private address, and be spoken to without TLS (`LLM4AGENTS_REGISTRIES`)."""
    refuse: Callable[[str], str | None] = lambda address: None
    """Asked for each address of a registry, token server or redirect that is not `known`: why it is not dialled, or
    None. A server passes one that knows private addresses: references are its callers' words."""

    @classmethod
    def parse(
        cls, default: str | None, known: str, refuse: Callable[[str], str | None] | None = None
    ) -> Registries:
        """From the settings: `known` is `HOST`, `http://HOST:PORT` or `NAME=ENDPOINT`, between commas.

        Raises InvalidRequestError naming the part that cannot be read.
        """
        found: dict[str, str] = {}
        for part in filter(None, (part.strip() for part in known.split(","))):
            name, equals, endpoint = part.partition("=")
            endpoint = endpoint if equals else name
            name = name if equals else re.sub(r"^https?://", "", name).partition("/")[0]
            if not _ENDPOINT.fullmatch(endpoint) or not _HOST.fullmatch(name):
                raise InvalidRequestError(
                    f"{part!r} is no registry",
                    hint="HOST[:PORT], http://HOST[:PORT], or NAME=[http://]HOST[:PORT][/PREFIX]",
                )
            found[name] = endpoint.rstrip("/")
        if default is not None and not _ENDPOINT.fullmatch(default):
            raise InvalidRequestError(f"{default!r} is no registry", hint="HOST[:PORT][/PREFIX]")
        return cls(default.rstrip("/") if default else None, found, refuse or (lambda address: None))


_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252})(?::\d{1,5})?|\[[0-9A-Fa-f:]+\](?::\d{1,5})?")
_ENDPOINT = re.compile(
    rf"(?:https?://)?(?:{_HOST.pattern})(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*/?",
)


@dataclass(frozen=True, slots=True)
class OciConfig:
    """What an image says of how it is to be run."""

    env: Mapping[str, str]
    workdir: str
    """Absolute; it is there once the files are."""
    user: str | None
    """Name or uid of who runs it, without a group; None: it names nobody, which is root elsewhere."""
    group: str | None
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    ports: tuple[int, ...]
    """Exposed TCP ports."""
    labels: Mapping[str, str]
    volumes: tuple[str, ...] = ()
    """Absolute paths."""
    diffs: tuple[str, ...] = ()
    """SHA-256 of each layer's tar, 64 hex digits."""
    # What is known once its files are there.
    shell: str | None = None
    """Path of the shell it has; None: an image of programs alone, in which steps that need a shell cannot run."""
    systemd: bool = False
    """Whether what it runs is systemd: to be started by exec with `init`, not as it is."""

    @property
    def argv(self) -> tuple[str, ...]:
        """What it runs when nobody says otherwise; empty: nothing."""
        return (*self.entrypoint, *self.cmd)


@dataclass(frozen=True, slots=True)
class OciRootfs:
    """An image's root file system with what a sandbox needs added: an EROFS blob of the cache."""

    path: Path
    digest: str
    """SHA-256 of the blob."""
    bytes: int
    config: OciConfig
    manifest: str
    """Digest (`sha256:…`) of the image's manifest for its platform: what was really used."""
    packages: tuple[tuple[str, str], ...] = ()
    """Names and versions of the Debian packages in it."""
    notes: tuple[str, ...] = ()
    """What of the image is not as it says, a line each."""
