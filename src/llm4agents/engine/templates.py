"""Templates on this node: which variant a create clones, having one built when there is none, removing them.

Not here: what lies in the cache (`variants`), how one is built (`building`), what it is made of (images), clones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from llm4agents import binaries, limits
from llm4agents.barrier.ca import Authority
from llm4agents.config import Settings
from llm4agents.engine import names, parts
from llm4agents.engine.admission import Admission
from llm4agents.engine.building import freezing
from llm4agents.engine.building.freezing import Plan, Workshop
from llm4agents.engine.building.warming import warm_up
from llm4agents.engine.parts import Parts, Shape, Variant
from llm4agents.engine.variants import RECIPE, Variants
from llm4agents.errors import (
    ConflictError,
    HostSetupError,
    InvalidRequestError,
    LLM4AgentsError,
    NotFoundError,
    TemplateNotFoundError,
    VersionMismatchError,
)
from llm4agents.guest.verbs import Agent
from llm4agents.images import bundle, disk, spec
from llm4agents.images.cache import Cache
from llm4agents.images.initramfs import build_initrd
from llm4agents.images.kernel import build_kernel
from llm4agents.images.process import in_thread
from llm4agents.images.progress import Progress, silent
from llm4agents.images.rootfs import build_rootfs
from llm4agents.images.spec import TemplateSpec
from llm4agents.vmm import snapshot as snapshots
from llm4agents.vmm.base import Driver, Snapshot
from llm4agents.vmm.choice import LABELS, Drivers, canonical

__all__ = ["Progress", "Shape", "Templates", "silent", "warm_up"]


class Templates(Variants):
    """The templates of one cache. Remembers what it has verified, so a create looks nothing up."""

    def __init__(self, settings: Settings, drivers: Drivers, admission: Admission | None = None) -> None:
        """`admission` is asked for a build's memory; without one there is no bound but the host's."""
        super().__init__(Cache(settings.cache))
        self.workshop = Workshop(self.cache, settings.run_dir / "vm", admission)
        self._ca_directory = settings.ca_directory
        self._authority: Authority | None = None
        self._drivers = drivers
        self._asked_for = settings.vmm
        self._ready: dict[Shape, tuple[Variant, Snapshot]] = {}
        self._building: dict[Shape, asyncio.Task[tuple[Variant, Snapshot]]] = {}
        self._listeners: dict[Shape, list[Progress]] = {}
        self.rebuild: Callable[[Shape, Progress], Awaitable[tuple[Variant, Snapshot]]] | None = None
        """Builds a shape of one that was made by a recipe (`building.builds`)."""
        self.users_of: Callable[[str], list[str]] = lambda _: []
        """The sandboxes that lie on the variant of that key: it is not removed while there are any."""

    def authority(self) -> Authority:
        """The node's CA, made when there is none. The first call blocks: for a thread. Raises HostSetupError."""
        if self._authority is None:
            self._authority = Authority.open(self._ca_directory)
        return self._authority

    def check_ca(self, name: str, key: str | None) -> None:
        """Before a sandbox of that variant gets a network that intercepts TLS: does its guest trust this node's CA?

        Raises VersionMismatchError with the way out; NotFoundError when the template is gone.
        """
        held = next((ready for ready in self._ready.values() if ready[0].key == key), None)
        found = held or self.find_at(self.cache.templates / name / "keys" / str(key))
        if found is None:
            raise NotFoundError(f"the template {name} ({key}) is gone from the cache")
        parts.check_ca(found[0], self.authority().digest)

    @property
    def held_bytes(self) -> int:
        """Memory of the host that frozen machines take up, each once for all its clones."""
        return sum(snapshot.memory_bytes for _, snapshot in self._ready.values())

    # -- asking for one -----------------------------------------------------------------------------------

    async def shape(
        self, name: str, vcpus: int, memory_mib: int, *, vmm: str | None = None, nested: bool = False
    ) -> Shape:
        """What a create that says this is to be a clone of: which VMM it gets is decided here.

        What cannot be built anew (a snapshot) is of the VMM that it was made with. Raises HostSetupError (no such
        VMM here), VersionMismatchError (a snapshot that only another VMM can load), InvalidRequestError.
        """
        wanted = vmm or self._asked_for
        if name not in spec.BUILTIN and names.valid(name):
            there = [of for of in self._drivers.all if self._pins(Shape(name, vcpus, memory_mib, of, nested))]
            if not there and self._pins_of(name, vcpus, memory_mib, not nested):
                raise InvalidRequestError(
                    f"{names.shown(name)} is a template of {'ordinary' if nested else 'nested'} sandboxes",
                    hint=f"create it {'without' if nested else 'with'} nested=True (--nested)",
                )
            if there and wanted is None:
                vmm = there[0]
            elif there and canonical(wanted or "") not in there:
                raise VersionMismatchError(
                    f"{names.shown(name)} was made with {LABELS[there[0]]}: no other VMM can load it",
                    hint="leave out --vmm (LLM4AGENTS_VMM)",
                )
        driver = await self._drivers.pick(vmm, nested)
        return Shape(name, vcpus, memory_mib, driver.name, nested)

    def ready(self, shape: Shape) -> tuple[Variant, Snapshot] | None:
        """The variant if this process has already verified it; what creates go by."""
        found = self._ready.get(shape)
        # Another server on this cache may have replaced it, or somebody has emptied the cache.
        return found if found is not None and (found[0].path / parts.TEMPLATE).exists() else None

    async def variant(
        self, shape: Shape, progress: Progress = silent, *, rebuild: bool = False
    ) -> tuple[Variant, Snapshot]:
        """The variant of that shape, built if there is none that fits; several who ask at once share one build.

        Raises TemplateNotFoundError, InvalidRequestError, HostSetupError, CapacityError, BootError.
        """
        if not rebuild and (found := self.ready(shape) or await self._pinned(shape)):
            return found
        if self.rebuild is not None and self.recipe_of(shape.name) is not None:
            return await self.rebuild(shape, progress)
        wanted = spec.get(shape.name)
        parts.check_shape(shape.vcpus, shape.memory_mib, os.cpu_count() or 1)
        if rebuild and (found := self.ready(shape)):
            self._check_unused(shape.name, [found[0].key])
        task = self._building.get(shape)
        listeners = self._listeners.setdefault(shape, [])
        listeners.append(progress)
        if task is None:

            def tell(step: str, detail: str, fraction: float | None) -> None:
                for listener in list(listeners):
                    listener(step, detail, fraction)

            task = asyncio.create_task(self._prepare(wanted, shape, tell, rebuild))
            self._building[shape] = task
            task.add_done_callback(lambda ended: self._not_building(shape, ended))
        try:
            # The build goes on for others when one who waits goes away; the last one's going ends it.
            return await asyncio.shield(task)
        finally:
            listeners.remove(progress)
            if not listeners and not task.done():
                # Forgotten first: who asks from now on must not join a build that is being ended.
                self._not_building(shape, task)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, LLM4AgentsError):
                    await task

    def _not_building(self, shape: Shape, task: asyncio.Task[tuple[Variant, Snapshot]]) -> None:
        if self._building.get(shape) is task:
            del self._building[shape]

    async def _prepare(
        self, wanted: TemplateSpec, shape: Shape, progress: Progress, rebuild: bool
    ) -> tuple[Variant, Snapshot]:
        driver = self._drivers.of(shape.vmm)
        async with self.cache.building(progress):
            made_of = await self.parts_of(wanted, driver, progress, refresh=rebuild, nested=shape.nested)
            machine = made_of.machine(shape, Path(parts.UPPER))
            can = await driver.capabilities()
            identity = driver.identity(machine, can)
            key = parts.variant_key(wanted, made_of, identity, shape, can.disk_format)
            dest = self.cache.templates / wanted.name / "keys" / key
            if rebuild:
                self._check_unused(wanted.name, [key])
            async with self.cache.lock(f"template-{key}", progress):
                found = None if rebuild else self.find_at(dest)
                # The key says what it should be, the manifest what it is: only both together are loaded.
                if found is None or found[1].identity != identity:
                    if words := self._made_elsewhere(shape, identity):
                        progress("build", words, None)
                    await freezing.build(
                        self.workshop,
                        _plan(wanted, made_of, shape, key, dest, can.disk_format),
                        driver,
                        progress,
                    )
                    found = self.find_at(dest)
                    if found is None:
                        raise VersionMismatchError(f"the template just built in {dest} cannot be read")
        self._ready[shape] = found
        for pin in self._pins(shape):
            pin.unlink(missing_ok=True)
        self._drop_others(found[0])
        self._drop_oldest(found[0])
        return found

    def _drop_oldest(self, kept: Variant) -> None:
        """Of a built-in template with more shapes than are kept: those made first that nothing lies on."""
        usual, found = self.size(kept.name), []
        for path in (self.cache.templates / kept.name / "keys").iterdir():
            with contextlib.suppress(LLM4AgentsError):
                other = parts.load(path, self.cache.blob)
                if path != kept.path and (other.vcpus, other.memory_mib) != usual:
                    found.append((other.created_at, path, other.shape))
        for _, path, shape in sorted(found)[: max(0, len(found) - limits.SHAPES_MAX)]:
            if not self.users_of(path.name) and shape not in self._building:
                self._ready.pop(shape, None)
                shutil.rmtree(path, ignore_errors=True)

    def _made_elsewhere(self, shape: Shape, identity: dict[str, str]) -> str | None:
        """Why a variant that is there is not used, if it is for what this host is: told before it is built anew."""
        for path in (self.cache.templates / shape.name / "keys").glob("*"):
            found = self.find_at(path)
            if found is not None and found[0].shape == shape and found[1].identity != identity:
                made = found[1].identity
                different = next(name for name in identity if made.get(name) != identity[name])
                return (
                    f"{shape.name} is built again for this host "
                    f"({different}: made with {made.get(different, 'none')}, here {identity[different]})"
                )
        return None

    # -- those that something lies on ---------------------------------------------------------------------

    async def by_key(self, name: str, key: str | None, *, loadable: bool = True) -> tuple[Variant, Snapshot]:
        """The very variant a sandbox was cloned from. `loadable`: its memory must be one this host can load.

        Raises NotFoundError when it is gone, VersionMismatchError when its machine cannot be loaded here.
        """
        # One removed by hand can be held here still; but what is paused now must come back later.
        held = (ready for ready in self._ready.values() if ready[0].key == key)
        found = next((ready for ready in held if (ready[0].path / parts.TEMPLATE).exists()), None)
        if found is None:
            found = self.find_at(self.cache.templates / name / "keys" / str(key)) if key else None
        if found is None:
            raise NotFoundError(
                f"the template {name} ({key}) that this sandbox lies on is gone from the cache",
                hint="was the cache emptied? nothing can be made of it without the template",
            )
        if loadable:
            await self.check_loadable(found[1])
        return found

    async def check_loadable(self, snapshot: Snapshot) -> None:
        """Raises VersionMismatchError unless this host's VMM of that kind would make the same machine."""
        name = str(snapshot.identity.get("driver"))
        try:
            driver = self._drivers.of(name)
            can = await self._drivers.can(name)
        except HostSetupError as error:
            raise VersionMismatchError(
                f"the snapshot {snapshot.path} is one of {LABELS.get(name, name)}, "
                f"which cannot be used here: {error.message}",
                hint=error.hint,
                different=["driver"],
            ) from error
        snapshots.check_identity(snapshot, driver.identity(snapshot.spec, can))

    def pin(self, variant: Variant) -> None:
        """From now on that variant is what its name and shape mean here."""
        self._ready.pop(variant.shape, None)
        for pin in self._pins(variant.shape):
            pin.unlink(missing_ok=True)
        self._pin(variant.shape).write_text(variant.key + "\n")

    async def boot_parts(self, driver: Driver, nested: bool, progress: Progress = silent) -> Parts:
        """Kernel and initramfs of this version, to boot any disk with."""
        return await self.parts_of(None, driver, progress, nested=nested)

    # -- made elsewhere: by recipes, on other hosts -------------------------------------------------------

    def published(self, path: Path, about: dict[str, Any] | None) -> tuple[Variant, Snapshot]:
        """What a build has published there is what its name and shape mean from now on. `about`: as `recipe_of`."""
        found = self.find_at(path)
        if found is None:
            raise VersionMismatchError(f"the template just built in {path} cannot be read")
        if about is not None:
            with self.cache.tmpdir() as tmp:
                (tmp / RECIPE).write_text(json.dumps(about, indent=1))
                (tmp / RECIPE).replace(self.cache.templates / found[0].name / RECIPE)
        self.pin(found[0])
        self._ready[found[0].shape] = found
        self._drop_others(found[0])
        return found

    def _pins_of(self, name: str, vcpus: int, memory_mib: int, nested: bool) -> bool:
        """Whether any VMM has a pinned variant of that kind."""
        shapes = (Shape(name, vcpus, memory_mib, vmm, nested) for vmm in self._drivers.all)
        return any(self._pins(shape) for shape in shapes)

    async def _pinned(self, shape: Shape) -> tuple[Variant, Snapshot] | None:
        """An imported variant is used as it is, whatever this host would build, as long as it can be loaded here.

        Raises VersionMismatchError for one that cannot, and cannot be built either.
        """
        if not names.valid(shape.name):
            return None
        for pin in self._pins(shape):
            with contextlib.suppress(OSError):
                found = self.find_at(self.cache.templates / shape.name / "keys" / pin.read_text().strip())
                if found is None or found[0].shape != shape:
                    continue
                try:
                    await self.check_loadable(found[1])
                except VersionMismatchError as error:
                    if shape.name in spec.BUILTIN:
                        return None
                    error.hint = "it was made on another host or VMM: make it again here"
                    raise
                self._ready[shape] = found
                return found
        return None

    async def export(self, shape: Shape, file: Path, progress: Progress) -> int:
        """Write a template of that shape (built first if it must be) to `file`; its size in bytes."""
        variant, _ = await self.variant(shape, progress)
        return await bundle.export(variant.path, file, self.cache, progress)

    async def import_(self, file: Path, progress: Progress) -> Variant:
        """Read a bundle; from now on it is what its name and shape mean here.

        Raises what `bundle.import_` does, and VersionMismatchError for a machine that cannot be loaded here.
        """

        loop = asyncio.get_running_loop()

        def check(template: dict[str, Any], manifest: dict[str, Any]) -> None:  # in a thread
            work = self._check_import(snapshots.from_json(file, manifest), template)
            asyncio.run_coroutine_threadsafe(work, loop).result()

        imported = await bundle.import_(file, self.cache, progress, check=check)
        found = self.find_at(imported.path)
        if found is None:
            raise VersionMismatchError(f"the template in {file} cannot be read", hint="export it again")
        self.pin(found[0])
        return found[0]

    async def _check_import(self, snapshot: Snapshot, template: dict[str, Any]) -> None:
        await self.check_loadable(snapshot)
        can = await self._drivers.can(snapshot.identity["driver"])
        if (form := template.get("disk_format", "qcow2")) != can.disk_format:
            raise VersionMismatchError(
                f"the template's disk is for machines with {form} disks; {LABELS[can.vmm]}'s have {can.disk_format}"
            )

    def _drop_others(self, kept: Variant) -> None:
        """Remove variants of the same shape that other inputs made: nothing clones from them any more."""
        for path in (self.cache.templates / kept.name / "keys").iterdir():
            if path == kept.path or self.users_of(path.name):
                continue
            with contextlib.suppress(LLM4AgentsError):
                other = parts.load(path, self.cache.blob)
                if other.shape != kept.shape:
                    continue
                if other.ca is not None and other.ca != kept.ca:
                    continue  # another node's, on the same cache; `template rm` and `prune --all` take it too
            # Live clones hold its files open and its memory sealed in the server: unlinking takes nothing away.
            shutil.rmtree(path, ignore_errors=True)

    async def parts_of(
        self,
        wanted: TemplateSpec | None,
        driver: Driver,
        progress: Progress,
        *,
        refresh: bool = False,
        nested: bool = False,
    ) -> Parts:
        """What a machine is booted from; without `wanted` there is no root file system among it."""
        can = await driver.capabilities()
        kernel = await build_kernel(
            self.cache, progress, refuses=lambda release: driver.refuses(release, can), refresh=refresh
        )
        agent = binaries.path(binaries.AGENT)
        initrd = await in_thread(lambda _: build_initrd(kernel, agent, self.cache, nested=nested))
        authority = await in_thread(lambda _: self.authority())
        made_of = Parts(
            kernel=kernel.vmlinux,
            kernel_release=kernel.release,
            kernel_digest=kernel.digest,
            initrd=initrd.path,
            initrd_digest=initrd.digest,
            rootfs=Path(),
            rootfs_digest="",
            contents=[],
            ca=authority.digest,
        )
        if wanted is None:
            return made_of
        rootfs = await build_rootfs(
            wanted, self.cache, progress, refresh=refresh, authority=authority.certificate_pem
        )
        contents = [asdict(content) for content in rootfs.contents]
        return replace(made_of, rootfs=rootfs.path, rootfs_digest=rootfs.digest, contents=contents)

    def check_shape(self, name: str, vcpus: int, memory_mib: int) -> None:
        """Raises InvalidRequestError or TemplateNotFoundError for what cannot be had here."""
        if not names.valid(name) or not self._pins_of(name, vcpus, memory_mib, False):
            spec.get(name)
        parts.check_shape(vcpus, memory_mib, os.cpu_count() or 1)

    # -- housekeeping -------------------------------------------------------------------------------------

    def _check_unused(self, name: str, keys: list[str]) -> None:
        users = sorted({user for key in keys for user in self.users_of(key)})
        if users:
            raise ConflictError(
                f"{len(users)} sandboxes lie on {names.shown(name)}: "
                f"{', '.join(users[:5])}{'…' if len(users) > 5 else ''}",
                hint="kill them first; what is paused needs the very template it was made from",
                sandboxes=users[:100],
            )

    async def remove(self, name: str) -> None:
        """Remove every variant of a template. Its sandboxes live on. Raises TemplateNotFoundError."""
        directory = self.cache.templates / name
        # What is no name would be a way out of the directory, which is removed.
        if not names.valid(name) or (name not in spec.BUILTIN and not directory.is_dir()):
            raise TemplateNotFoundError(
                f"there is no template {names.shown(name)!r}", hint="llm4agents template ls"
            )
        if any(shape[0] == name for shape in self._building):
            raise ConflictError(f"{name} is being built", hint="wait for it, or end the call that builds it")
        self._check_unused(name, [path.name for path in directory.glob("keys/*")])
        for shape in [shape for shape in self._ready if shape[0] == name]:
            _, snapshot = self._ready.pop(shape)
            await self._drivers.of(shape.vmm).release(snapshot.path)
        await in_thread(lambda _: shutil.rmtree(directory, ignore_errors=True))


def _plan(
    wanted: TemplateSpec, made_of: Parts, shape: Shape, key: str, dest: Path, form: Literal["qcow2", "raw"]
) -> Plan:
    async def upper(path: Path) -> None:
        await disk.make_upper(path, limits.DISK_GIB << 30)

    async def warm(agent: Agent, progress: Progress) -> None:
        await warm_up(agent, wanted, progress)

    variant = replace(
        made_of.variant(shape, path=dest, key=key, disk_format=form),
        environment=dict(wanted.environment),
        services=[service.name for service in wanted.warm_up.services],
    )
    return Plan(variant, lambda upper: made_of.machine(shape, upper), upper, warm)
