"""The variants of templates that lie in a cache: found, told apart, described.

A variant is what `parts` says it is. What a name and a shape mean here may be pinned to one: an import, a snapshot,
what a recipe made. Not here: which of them a create clones, having one built, removing any (`templates`).
"""

from __future__ import annotations

import builtins
import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from llm4agents import limits
from llm4agents.engine import names, parts
from llm4agents.engine.parts import Shape, Variant
from llm4agents.errors import ConflictError, InvalidRequestError, LLM4AgentsError, VersionMismatchError
from llm4agents.images import spec
from llm4agents.images.cache import Cache
from llm4agents.images.spec import TemplateSpec
from llm4agents.vmm import snapshot as snapshots
from llm4agents.vmm.base import Snapshot

RECIPE = "recipe.json"


class Variants:
    """The half of `Templates` that reads the cache."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def list(self) -> list[Variant]:
        """Every variant on disk that can be read."""
        found = []
        for path in sorted(self.cache.templates.glob("*/keys/*")):
            with contextlib.suppress(VersionMismatchError):
                found.append(parts.load(path, self.cache.blob))
        return found

    def find_at(self, path: Path) -> tuple[Variant, Snapshot] | None:
        """The variant in that directory, if it is one that is whole; what is broken is removed."""
        if not (path / parts.TEMPLATE).exists():
            return None
        try:
            variant, snapshot = parts.load(path, self.cache.blob), snapshots.load(path / parts.SNAPSHOT)
            # What it says of itself elsewhere (a bundle is a stranger's) is of no weight.
            # And what a machine of it takes is what is asked for and counted.
            spec, vmm = snapshot.spec, str(snapshot.identity.get("driver"))
            shape = Shape(variant.name, spec.vcpus, spec.memory_mib, vmm, spec.nested)
            return replace(variant, **shape._asdict()), snapshot
        except LLM4AgentsError:
            shutil.rmtree(path, ignore_errors=True)
            return None

    def newest(self, name: str, vmm: str) -> Variant | None:
        """The variant of that name, of whatever shape, that was made last on that VMM."""
        found = [one for one in self.list() if one.name == name and one.vmm == vmm]
        return max(found, key=lambda one: one.created_at, default=None)

    def size(self, name: str) -> tuple[int, int]:
        """vCPUs and MiB of a create that says none: the template's own, or the one shape that a snapshot has."""
        default = limits.DEFAULT_VCPUS, limits.DEFAULT_MEMORY_MIB
        if (found := spec.BUILTIN.get(name)) is not None:
            return found.vcpus or default[0], found.memory_mib or default[1]
        if not names.valid(name):
            return default
        if (about := self.recipe_of(name)) is not None:
            wanted = about["recipe"]
            return int(wanted.get("vcpus") or default[0]), int(wanted.get("memory_mib") or default[1])
        shapes = set()
        for path in (self.cache.templates / name).glob("pinned-*"):
            with contextlib.suppress(ValueError, IndexError):
                words = path.name.split("-")
                shapes.add((int(words[1]), int(words[2])))
        return shapes.pop() if len(shapes) == 1 else default

    @staticmethod
    def spec_of(variant: Variant) -> TemplateSpec:
        """The services and environment of a variant's machines; a snapshot's are those of what it came from."""
        found = spec.BUILTIN.get(variant.family or variant.name)
        if found is None:
            return TemplateSpec(variant.name, variant.description, (), environment=variant.environment)
        return replace(found, environment=variant.environment)

    def recipe_of(self, name: str) -> dict[str, Any] | None:
        """`{recipe, project}` of a template that was made by one. Reads the disk."""
        if name in spec.BUILTIN or not names.valid(name):
            return None
        try:
            body = json.loads((self.cache.templates / name / RECIPE).read_text())
        except (OSError, ValueError):
            return None
        return body if isinstance(body, dict) and "recipe" in body else None

    # -- what a name means here -------------------------------------------------------------------------

    def _pin(self, shape: Shape) -> Path:
        kind = f"{shape.vmm}-nested" if shape.nested else shape.vmm
        return self.cache.templates / shape.name / f"pinned-{shape.vcpus}-{shape.memory_mib}-{kind}"

    def _pins(self, shape: Shape) -> builtins.list[Path]:
        """The files that say which variant that shape is, if it is an imported one or a snapshot."""
        found = [path for path in (self._pin(shape),) if path.exists()]
        # From before there were several VMMs: that of its variant.
        old = self.cache.templates / shape.name / f"pinned-{shape.vcpus}-{shape.memory_mib}"
        with contextlib.suppress(OSError, LLM4AgentsError):
            path = old.parent / "keys" / old.read_text().strip()
            if parts.load(path, self.cache.blob).shape == shape:
                found.append(old)
        return found

    def check_free(self, name: str) -> None:
        """Raises InvalidRequestError or ConflictError when a snapshot cannot be called `name`."""
        if not names.valid(name):
            raise InvalidRequestError(
                f"{name!r} cannot be a template's name", hint="a-z, 0-9, '-' and '_', beginning with a letter"
            )
        if name in spec.BUILTIN or any(variant.name == name for variant in self.list()):
            raise ConflictError(
                f"there is a template {names.shown(name)}", hint="llm4agents template rm, or another name"
            )

    def check_name(self, name: str) -> None:
        """Raises InvalidRequestError or TemplateNotFoundError for what cannot be built."""
        if self.recipe_of(name) is None:
            spec.get(name)

    # -- told -------------------------------------------------------------------------------------------

    def catalogue(self, project: str | None = None) -> builtins.list[dict[str, Any]]:
        """What can be created (by a project): each variant that is built, and what is not yet. Reads the disk."""
        seen = (None, project)
        variants = [one for one in self._current() if project is None or names.project_of(one.name) in seen]
        there = {variant.name for variant in variants}
        return [self.describe(variant) for variant in variants] + [
            self._unbuilt(name) for name in spec.BUILTIN if name not in there
        ]

    def described(self, ref: str) -> builtins.list[dict[str, Any]]:
        """As `catalogue`, of one template. Reads the disk."""
        found = [self.describe(one) for one in self._current() if one.name == ref]
        if not found and ref in spec.BUILTIN:
            return [self._unbuilt(ref)]
        return found

    def _current(self) -> builtins.list[Variant]:
        """Of each shape one: the pinned, else the newest. Older ones are kept for the sandboxes that lie on them."""
        shapes: dict[Shape, builtins.list[Variant]] = {}
        for variant in self.list():
            shapes.setdefault(variant.shape, []).append(variant)
        for shape, several in shapes.items():
            pinned = set[str]()
            for pin in self._pins(shape) if len(several) > 1 else ():
                with contextlib.suppress(OSError):
                    pinned.add(pin.read_text().strip())
            several.sort(key=lambda one: (one.key in pinned, one.created_at))
        return [several[-1] for several in shapes.values()]

    def describe(self, variant: Variant) -> dict[str, Any]:
        builtin = spec.BUILTIN.get(variant.name)
        usage = sum(p.stat().st_blocks * 512 for p in variant.path.rglob("*") if p.is_file())
        return {
            "name": names.shown(variant.name),
            "project": names.project_of(variant.name),
            "built": True,
            "key": variant.key,
            "vcpus": variant.vcpus,
            "memory_mib": variant.memory_mib,
            "bytes": usage,
            "rootfs_bytes": variant.rootfs.stat().st_size,
            "created_at": variant.created_at,
            "packages": variant.contents,
            "vmm": variant.vmm,
            "nested": variant.nested,
            "description": builtin.description if builtin else variant.description,
            "languages": list(builtin.languages) if builtin else [],
            "defaults": variant.defaults,
            "start": variant.start,
        }

    def _unbuilt(self, name: str) -> dict[str, Any]:
        """A built-in template that is not there; its shape is that of a create which says none."""
        wanted, (vcpus, memory_mib) = spec.BUILTIN[name], self.size(name)
        return {
            "name": name,
            "built": False,
            "vcpus": vcpus,
            "memory_mib": memory_mib,
            "description": wanted.description,
            "languages": list(wanted.languages),
        }
