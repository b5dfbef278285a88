"""What a build begins with: Debian packages, an OCI image, a built-in template, one of one's own or a snapshot.

Whatever it is, it is a read-only root file system and perhaps a disk over it. Not here: how these are made (`images`),
the steps that come after.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from llm4agents import recipe as recipes
from llm4agents.engine.parts import Parts, Variant
from llm4agents.errors import TemplateNotFoundError
from llm4agents.images import spec
from llm4agents.images.oci import OciRootfs
from llm4agents.images.progress import Progress
from llm4agents.images.spec import TemplateSpec
from llm4agents.recipe import Base, Run, Start, State
from llm4agents.vmm.base import Driver


@dataclass(frozen=True, slots=True)
class Begin:
    """What steps begin on."""

    key: str
    """Digest of all of it: the parent of the first step."""
    made_of: Parts
    state: State
    wanted: TemplateSpec | None
    """The built-in template whose services its machines have."""
    upper: Path | None = None
    """A disk over the root file system; None: an empty one."""
    start: Start | None = None
    """What lives in its machines already."""
    command: Run | None = None
    """An image's own."""

    @property
    def family(self) -> str | None:
        return None if self.wanted is None else self.wanted.name


class Makes(Protocol):
    """What `Templates` can do for a build."""

    async def parts_of(
        self, wanted: TemplateSpec | None, driver: Driver, progress: Progress, *, refresh: bool, nested: bool
    ) -> Parts: ...

    def newest(self, name: str, vmm: str) -> Variant | None: ...


def debian(packages: tuple[str, ...]) -> TemplateSpec:
    """The root file system of `from = {debian = […]}`: what `base` has, and these."""
    more = tuple(name for name in dict.fromkeys(packages) if name not in spec.BASE.packages)
    return TemplateSpec(
        name="debian",
        description="Debian",
        packages=(*spec.BASE.packages, *more),
        environment=spec.BASE.environment,
        build_bytes=4_000_000_000,
    )


async def resolve(
    base: Base,
    makes: Makes,
    find: Callable[[str], str],
    driver: Driver,
    progress: Progress,
    *,
    nested: bool,
    refresh: bool,
    image: Callable[[str], Awaitable[OciRootfs]],
) -> Begin:
    """Make or find it. `find`: the template that a name means to who builds; `image`: the root of one by its reference.

    Raises TemplateNotFoundError, InvalidRequestError, HostSetupError, CapacityError, and what `image` does.
    """
    if base.kind == "image":
        made_of = await makes.parts_of(None, driver, progress, refresh=refresh, nested=nested)
        return _of_image(await image(str(base.value)), made_of)
    if base.kind == "debian":
        wanted = debian(tuple(base.value))
        made_of = await makes.parts_of(wanted, driver, progress, refresh=refresh, nested=nested)
        return Begin(_key(made_of.rootfs_digest), made_of, State(env=dict(wanted.environment)), None)
    name = find(str(base.value))
    if name in spec.BUILTIN:
        wanted = spec.get(name)
        made_of = await makes.parts_of(wanted, driver, progress, refresh=False, nested=nested)
        return Begin(_key(made_of.rootfs_digest), made_of, State(env=dict(wanted.environment)), wanted)
    variant = makes.newest(name, driver.name)
    if variant is None:
        raise TemplateNotFoundError(
            f"there is no template {base.value!r} to begin with",
            hint="llm4agents template ls shows what there is; one made on another VMM cannot be used",
            name=str(base.value),
        )
    boot = await makes.parts_of(None, driver, progress, refresh=False, nested=nested)
    return _of_variant(variant, boot)


def _of_image(image: OciRootfs, boot: Parts) -> Begin:
    contents = [
        {"kind": "debian", "name": name, "version": version, "licence": None}
        for name, version in image.packages
    ]
    made_of = replace(boot, rootfs=image.path, rootfs_digest=image.digest, contents=contents)
    said = image.config
    # What an image says of itself goes before what helps programs to the certificates that are in it.
    state = State({**spec.TRUST, **said.env}, said.workdir, said.user or "root")
    key = _key(image.digest, more=state.to_json())
    return Begin(key, made_of, state, None, command=said.argv or None)


def _of_variant(variant: Variant, boot: Parts) -> Begin:
    family = variant.family or variant.name
    made_of = replace(
        boot,
        rootfs=variant.rootfs,
        rootfs_digest=variant.rootfs_digest,
        contents=variant.contents,
        ca=variant.ca,
    )
    state = State(dict(variant.environment), variant.workdir, variant.user or "user")
    start = None if variant.start is None else recipes.read_start(variant.start)
    return Begin(
        _key(variant.rootfs_digest, variant.disk or variant.key),
        made_of,
        state,
        spec.BUILTIN.get(family),
        variant.upper,
        start,
        None if start is None or start.run is True else start.run,
    )


def _key(rootfs: str, disk: str | None = None, more: Any = None) -> str:
    body: dict[str, Any] = {"rootfs": rootfs}
    if disk is not None:
        body["disk"] = disk
    if more is not None:
        body["more"] = more
    return recipes.digest(body)
