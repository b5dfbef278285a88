"""Templates by name: what one is (`kinds`) and those that are built in (`catalogue`). Pure.

`rootfs` builds the root file system of a spec; the engine boots it, runs the warm-up and freezes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from llm4agents.errors import InvalidRequestError, TemplateNotFoundError
from llm4agents.images.catalogue.base import BASE, HOME, TRUST
from llm4agents.images.catalogue.browser import BROWSER, BROWSER_PORT, BROWSER_SCRIPT
from llm4agents.images.catalogue.bun import BUN
from llm4agents.images.catalogue.coding import CODING
from llm4agents.images.catalogue.deno import DENO
from llm4agents.images.catalogue.go import GO
from llm4agents.images.catalogue.java import JAVA
from llm4agents.images.catalogue.node import NODE, NODE_DIRECTORY, NODE_READY, NODE_SOCKET
from llm4agents.images.catalogue.python import (
    PRELOAD,
    PYTHON,
    PYTHON_READY,
    PYTHON_SOCKET,
    RUNNER_DIRECTORY,
)
from llm4agents.images.catalogue.rust import RUST
from llm4agents.images.kinds import File, NpmPackage, Service, TemplateSpec, WarmStep, WarmUp

__all__ = [
    "BASE",
    "BROWSER",
    "BROWSER_PORT",
    "BROWSER_SCRIPT",
    "BUILTIN",
    "HOME",
    "NODE",
    "NODE_DIRECTORY",
    "NODE_READY",
    "NODE_SOCKET",
    "PRELOAD",
    "PYTHON",
    "PYTHON_READY",
    "PYTHON_SOCKET",
    "RUNNER_DIRECTORY",
    "TRUST",
    "File",
    "NpmPackage",
    "Service",
    "TemplateSpec",
    "WarmStep",
    "WarmUp",
    "get",
    "valid_name",
]

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")

BUILTIN: Mapping[str, TemplateSpec] = MappingProxyType(
    {spec.name: spec for spec in (BASE, PYTHON, NODE, DENO, BUN, GO, RUST, JAVA, CODING, BROWSER)}
)


def valid_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def get(name: str) -> TemplateSpec:
    """The built-in spec of that name. InvalidRequestError for a bad name, TemplateNotFoundError for none."""
    shown = name.partition("@")[
        0
    ]  # a project's own is NAME@PROJECT on disk (engine.names), and to nobody else
    if not _NAME.fullmatch(shown):
        raise InvalidRequestError(f"{shown!r} cannot be a template's name (a-z, 0-9, '.', '_', '-')")
    if name not in BUILTIN:
        raise TemplateNotFoundError(
            f"there is no template {shown!r}",
            hint=f"built in are {', '.join(sorted(BUILTIN))}; llm4agents template ls shows your own too",
            name=shown,
        )
    return BUILTIN[name]
