"""Where our two static binaries are: the guest agent and the shim that parents and jails VMMs.

A wheel carries them in `_bin/`. A checkout has none: `scripts/bootstrap` builds them into the cache under
the digest of their sources, so a changed source is never run with an old binary.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

from llm4agents.config import settings
from llm4agents.errors import HostSetupError

AGENT, SHIM = "llm4agents-agent", "llm4agents-shim"
_PACKAGE = Path(__file__).parent


def checkout_root() -> Path | None:
    """The source checkout this package runs from, or None when it is installed from a wheel."""
    root = _PACKAGE.parent.parent
    return root if (root / "agent" / "Cargo.toml").exists() and (root / "pyproject.toml").exists() else None


def sources_digest(root: Path) -> str:
    """Digest of everything the binaries are built from: Cargo files and sources of both crates."""
    digest = hashlib.sha256()
    files = [root / "Cargo.toml", root / "Cargo.lock"]
    for crate in ("agent", "shim"):
        files += sorted(
            path
            for path in (root / crate).rglob("*")
            if path.is_file() and path.suffix in (".rs", ".toml") and not {"fuzz", "target"} & set(path.parts)
        )
    for path in files:
        if path.exists():
            digest.update(f"{path.relative_to(root)}\0".encode())
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()[:32]


def build_dir(root: Path) -> Path:
    return settings().cache / "build" / "bin" / sources_digest(root)


@cache
def path(name: str) -> Path:
    """The absolute path of one of our binaries.

    Raises HostSetupError when it was never built here.
    """
    override = os.environ.get("LLM4AGENTS_BIN_DIR")
    root = checkout_root()
    places = [Path(override)] if override else [_PACKAGE / "_bin"]
    if not override and root is not None:
        places.insert(0, build_dir(root))
    for place in places:
        if (place / name).is_file():
            return place / name
    raise HostSetupError(
        f"{name} is not built (looked in {', '.join(map(str, places))})",
        hint="run scripts/bootstrap in the checkout, or install the Linux x86-64 wheel",
    )
