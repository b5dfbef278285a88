"""What a template is, as data: packages, files, environment, and how its machine is warmed up. Pure.

The built-in ones are in `catalogue`; `spec` has them by name. `{python}` in a path stands for the version of the
guest's python3 (3.11, 3.13).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

_ROOTFS_FIELDS = ("packages", "wheels", "drop", "runner", "files")
_ROOTFS_EXTRAS = ("node", "moves", "release_packages", "npm")


@dataclass(frozen=True, slots=True)
class File:
    path: str
    content: str
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Service:
    """A process that lives in the frozen machine and so in every clone, started by exec with `service=…`.

    It is ready when `ready_socket` (in the guest) can be connected to; None: at once.
    """

    name: str
    argv: tuple[str, ...]
    user: str = "user"
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    restore_signal: int | None = None
    """Sent by `post_restore` while the service is still frozen: draw new random state."""
    ready_socket: str | None = None
    ready_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class WarmStep:
    """A command run to its end before the freeze, so that its pages and its path through the kernel are warm."""

    argv: tuple[str, ...]
    user: str = "user"
    timeout_s: float = 60.0
    may_fail: bool = False


@dataclass(frozen=True, slots=True)
class WarmUp:
    """In this order: services are started and waited for, steps run, cells run; then the machine is frozen."""

    services: tuple[Service, ...] = ()
    steps: tuple[WarmStep, ...] = ()
    cells: tuple[str, ...] = ()
    """Python run through the interpreter by the host. The built-in one warms itself (its `--warm`)."""


@dataclass(frozen=True, slots=True)
class NpmPackage:
    """A package of npm's registry of which some files belong in the image: its tar ball, pinned by its digest."""

    name: str
    version: str
    integrity: str
    """As npm's own locks have it: `sha512-` and base64."""
    licence: str
    files: tuple[tuple[str, str, int], ...]
    """(path in the tar ball, path in the guest, mode)."""


@dataclass(frozen=True, slots=True)
class TemplateSpec:
    name: str
    description: str
    packages: tuple[str, ...]
    """Debian packages beside the essential ones and apt."""
    release_packages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More of them, by the release's code name where they have other names in each; the last is for newer ones."""
    languages: tuple[str, ...] = ()
    """Programming languages that run in it as it is, beside the shell's."""
    vcpus: int | None = None
    memory_mib: int | None = None
    """What a create that says nothing gets; None: the usual."""
    wheels: str | None = None
    """Name of the lock files `data/NAME-{python}.lock`."""
    drop: tuple[str, ...] = ()
    """Directories of wheels that are left out (their tests), from dist-packages."""
    runner: bool = False
    """Whether `data/runner` goes to RUNNER_DIRECTORY."""
    node: bool = False
    """Whether `data/node`, and what it needs, goes to NODE_DIRECTORY."""
    moves: tuple[tuple[str, str], ...] = ()
    """Directories of wheels that belong elsewhere: (path in dist-packages, directory in the guest)."""
    npm: tuple[NpmPackage, ...] = ()
    files: tuple[File, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of every exec in a clone, under what the call itself sets."""
    warm_up: WarmUp = WarmUp()
    build_bytes: int = 1_000_000_000
    """Disk a build needs for a while."""
    rootfs_bytes: int = 300_000_000

    def rootfs_inputs(self) -> dict[str, Any]:
        """Of the spec, what the root file system is made from: JSON-able, equal for equal results."""
        found = {name: _plain(getattr(self, name)) for name in _ROOTFS_FIELDS}
        # Named only where they are used, so that they are no news to templates that lack them.
        return found | {name: _plain(getattr(self, name)) for name in _ROOTFS_EXTRAS if getattr(self, name)}

    def packages_for(self, codename: str) -> tuple[str, ...]:
        """The Debian packages in the release of that code name."""
        more = self.release_packages
        newest = [*more.values()][-1] if more else ()
        return (*self.packages, *more.get(codename, newest))

    def warm_inputs(self) -> dict[str, Any]:
        """Of the spec, what the frozen machine depends on beyond its disks; for the key of a variant."""
        return {"environment": _plain(self.environment), "warm_up": _plain(self.warm_up)}


def _plain(value: Any) -> Any:
    """A JSON-able copy."""
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
