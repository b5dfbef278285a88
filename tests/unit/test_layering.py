"""Imports point one way, pure modules do no I/O, modules stay small: the structure of design.md, enforced."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src" / "llm4agents"

BASE = {
    "errors",
    "config",
    "limits",
    "binaries",
    "fair",
    "protected",
    "recipe",
    "scratch",
    "tarblocks",
    "outbound",
}
MAY_IMPORT = {
    "errors": set(),
    "fair": set(),
    "limits": set(),
    "protected": set(),
    "recipe": {"errors", "limits"},
    "scratch": set(),
    "outbound": set(),
    "tarblocks": {"errors", "limits", "protected"},
    "config": {"errors", "limits", "protected"},
    "binaries": {"config", "errors"},
    "store": BASE,
    "guest": BASE,
    "vmm": BASE,
    "images": BASE,
    "barrier": BASE,
    "wallet": BASE | {"store"},
    "engine": BASE | {"store", "guest", "vmm", "images", "barrier", "wallet"},
    "api": BASE | {"engine", "tools"},
    "tools": BASE | {"sdk"},
    "sdk": BASE,
    "cli": BASE | {"sdk", "tools"},
    "": BASE | {"sdk"},
    "__main__": {"cli"},
}
# Stated exceptions, each with its reason.
ALLOWED = {
    ("sdk", "engine.doctor"): "doctor must work where the server cannot start",
}
PURE = [
    "barrier/gateway/dns.py",
    "barrier/gateway/hello.py",
    "barrier/gateway/http1.py",
    "barrier/gateway/meter.py",
    "barrier/gateway/packets.py",
    "barrier/gateway/words.py",
    "api/access/table.py",
    "engine/lifecycle.py",
    "engine/names.py",
    "engine/principal.py",
    "guest/frames.py",
    *(f"images/catalogue/{path.name}" for path in sorted((SRC / "images/catalogue").glob("*.py"))),
    "images/kinds.py",
    "images/spec.py",
    "vmm/base.py",
    "vmm/cmdline.py",
    "vmm/firecracker/api.py",
    "vmm/firecracker/jailer.py",
    "vmm/firecracker/versions.py",
    "vmm/qemu/command.py",
    "barrier/addresses.py",
    "barrier/rules.py",
    "barrier/network.py",
    "barrier/judging.py",
    "barrier/policy.py",
    "barrier/why.py",
    "errors.py",
    "fair.py",
    "limits.py",
    "protected.py",
    "recipe.py",
    "tarblocks.py",
]
IO_MODULES = {
    "asyncio",
    "socket",
    "subprocess",
    "shutil",
    "sqlite3",
    "httpx",
    "threading",
    "tempfile",
    "fcntl",
}


def _files() -> Iterator[Path]:
    for path in sorted(SRC.rglob("*.py")):
        if "data" not in path.relative_to(SRC).parts:
            yield path


def _imports(path: Path, *, runtime_only: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if runtime_only and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped.update(ast.walk(node))
    package = ("llm4agents", *path.relative_to(SRC).parts[:-1])
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _room(path: Path) -> str:
    relative = path.relative_to(SRC)
    if len(relative.parts) > 1:
        return relative.parts[0]
    return "" if relative.stem == "__init__" else relative.stem


@pytest.mark.parametrize("path", list(_files()), ids=lambda p: str(p.relative_to(SRC)))
def test_imports_point_one_way(path: Path) -> None:
    room = _room(path)
    allowed = MAY_IMPORT[room] | {room}
    exceptions = {name for (of, name) in ALLOWED if of == room}
    rooms = {p.name for p in SRC.iterdir() if p.is_dir()} | {p.stem for p in SRC.glob("*.py")} - {"__init__"}
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] != "llm4agents" or len(parts) < 2 or parts[1] not in rooms:
            continue
        if any(name == f"llm4agents.{e}" or name.startswith(f"llm4agents.{e}.") for e in exceptions):
            continue
        if name == "llm4agents.engine" and any(e.startswith("engine.") for e in exceptions):
            continue
        assert parts[1] in allowed, (
            f"{path.relative_to(SRC)} ({room or 'package root'}) must not import {name}"
        )


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_no_io(name: str) -> None:
    bad = IO_MODULES & {module.split(".")[0] for module in _imports(SRC / name, runtime_only=True)}
    assert not bad, f"{name} is pure and must not import {sorted(bad)}"


def test_modules_are_small() -> None:
    root = SRC.parents[1]
    rust = [path for room in ("agent", "shim") for path in (root / room / "src").rglob("*.rs")]
    long = {
        str(p.relative_to(root)): n
        for p in (*_files(), *rust)
        if (n := len(p.read_text().splitlines())) > 600
    }
    assert not long, f"split these: {long}"
