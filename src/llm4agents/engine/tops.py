"""A sandbox's writable disk, in the two forms that VMMs have it: a qcow2 over the template's, or a whole sparse file.

What is common to acts on disks is here twice, once for each form, so that nobody else asks which it is. A top's name
says its form (`.qcow2`, `.raw`). Not here: when a disk stands still (`pausing`, `forking`), copying bytes (`images`).
"""

from __future__ import annotations

import asyncio
import filecmp
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from llm4agents.engine.live import Live
from llm4agents.engine.node import TOP, Chain, Node, chain_of, new_layer
from llm4agents.engine.parts import Variant
from llm4agents.errors import LLM4AgentsError
from llm4agents.images import disk, layers
from llm4agents.store import SandboxRow

Format = Literal["qcow2", "raw"]


@dataclass(frozen=True, slots=True)
class Taken:
    """The disk of a photograph: what the tops of what is made of it read as."""

    under: tuple[str, ...] = ()
    """Layers, nearest first, that they lie on."""
    source: Path | None = None
    """The whole file they are copies of."""


class Tops(Protocol):
    @property
    def format(self) -> Format: ...

    @property
    def first(self) -> str:
        """The name of a sandbox's first top."""

    def name(self) -> str:
        """Of another top."""

    def chain(self, under: tuple[str, ...] = ()) -> dict[str, object] | None:
        """`row.disk` of a new sandbox, whose top lies on the layers `under`."""

    async def finish(self, base: Path, empty: Path, *, named: Path) -> None:
        """Make whatever tops over `base` are made from, as `empty`; `base` will be called `named` by then."""

    async def over(self, base: Path, empty: Path, path: Path) -> None:
        """Make `path`, a private disk that reads as `base` (whose `empty` is there, if `finish` made one).

        Raises ConflictError when it exists, CapacityError.
        """

    async def take(
        self, node: Node, row: SandboxRow, live: Live | None, variant: Variant, room: Path
    ) -> Taken:
        """The disk of a sandbox that stands still, as it is now; its own goes on from there. `room`: a name for files
        that are gone with the photograph."""

    async def whole(self, files: tuple[Path, ...], base: Path, dest: Path) -> None:
        """The disk of those files (top first) over `base` as one raw file, durably."""

    async def of_whole(self, whole: Path, base: Path, dest: Path) -> None:
        """A top `dest`, over `base` if that is its form, that reads as the raw file `whole`. Durably."""


class Qcow2:
    """Layers: a fork freezes the top as one, and both go on with empty tops over it."""

    format: Final = "qcow2"
    first: Final = TOP

    def name(self) -> str:
        return f"upper-{secrets.token_hex(6)}.qcow2"

    def chain(self, under: tuple[str, ...] = ()) -> dict[str, object] | None:
        return Chain(TOP, under).to_json() if under else None

    async def finish(self, base: Path, empty: Path, *, named: Path) -> None:
        await disk.make_overlay(base, empty, named=named)

    async def over(self, base: Path, empty: Path, path: Path) -> None:
        if empty.exists():
            disk.clone_overlay(empty, path)  # 200 KiB: sooner done than a thread is asked
        else:
            await disk.make_overlay(base, path)

    async def take(
        self, node: Node, row: SandboxRow, live: Live | None, variant: Variant, room: Path
    ) -> Taken:
        under = _freeze(node, row, variant)
        if live is not None:
            top, below = node.places.chain(row)
            # Under the new top, and not under the name the old one had: that is gone.
            try:
                await live.machine.switch_disk("upper", variant.disks(top, below)[1])
            except LLM4AgentsError:
                if not live.ending:
                    unfreeze(node, row)
                raise
        return Taken(under)

    async def whole(self, files: tuple[Path, ...], base: Path, dest: Path) -> None:
        await layers.to_raw(files, base, dest)

    async def of_whole(self, whole: Path, base: Path, dest: Path) -> None:
        await layers.from_raw(whole, base, dest)


class Raw:
    """Whole files: a fork copies the top, by reference where the file system can, else what is data in it."""

    format: Final = "raw"
    first: Final = "upper.raw"

    def name(self) -> str:
        return f"upper-{secrets.token_hex(6)}.raw"

    def chain(self, under: tuple[str, ...] = ()) -> dict[str, object] | None:
        return Chain(self.first).to_json()

    async def finish(self, base: Path, empty: Path, *, named: Path) -> None:
        pass

    async def over(self, base: Path, empty: Path, path: Path) -> None:
        await asyncio.to_thread(disk.copy_sparse, base, path)

    async def take(
        self, node: Node, row: SandboxRow, live: Live | None, variant: Variant, room: Path
    ) -> Taken:
        top, _ = node.places.chain(row)
        if live is None:
            return Taken(source=top)  # nothing writes to it while it is paused
        await asyncio.to_thread(disk.copy_sparse, top, room)
        return Taken(source=room)

    async def whole(self, files: tuple[Path, ...], base: Path, dest: Path) -> None:
        await asyncio.to_thread(disk.copy_sparse, files[0], dest, durable=True)

    async def of_whole(self, whole: Path, base: Path, dest: Path) -> None:
        await asyncio.to_thread(disk.copy_sparse, whole, dest, durable=True)


_ALL: Final[dict[str, Tops]] = {"qcow2": Qcow2(), "raw": Raw()}


def of(form: str | Path) -> Tops:
    """By form, or by a top's path."""
    return _ALL[form if isinstance(form, str) else form.suffix.removeprefix(".")]


def files_of(taken: Taken, node: Node) -> tuple[Path, ...]:
    """What a photograph's disk is, top first, for `whole`."""
    if taken.source is not None:
        return (taken.source,)
    return tuple(node.places.layer(layer) for layer in taken.under)


async def moved(node: Node, row: SandboxRow, variant: Variant, onto: Variant) -> None:
    """Give the disk of a sandbox that stands still, cloned from `variant`, the form of `onto`, over the disk of that.

    The store is told when the new one is durable; the old one is gone then.
    """
    top, under = node.places.chain(row)
    new = node.places.disk(row.id, of(onto.disk_format).name())
    whole = new.with_suffix(".whole")
    try:
        await of(top).whole((top, *under), variant.upper, whole)
        await of(new).of_whole(whole, onto.upper, new)
    finally:
        whole.unlink(missing_ok=True)
    node.store.change(row, disk=Chain(new.name).to_json(), template_key=onto.key)
    top.unlink(missing_ok=True)


def _freeze(node: Node, row: SandboxRow, variant: Variant) -> tuple[str, ...]:
    """Make the top of a sandbox's disk a layer and give it a new, empty one; the layers from the new one on.

    The store is told before a machine is: if it never hears of it, the new top stays empty and reads as the old.
    """
    places, chain = node.places, chain_of(row)
    layer, top = new_layer(), of("qcow2").name()
    places.layers.mkdir(mode=0o700, exist_ok=True)
    old = places.disk(row.id, chain.top)
    if row.state == "paused" and chain.layers and filecmp.cmp(old, variant.empty, shallow=False):
        return chain.layers  # forked before, and not run since: there is nothing on it
    disk.clone_overlay(variant.empty, places.disk(row.id, top))
    os.link(old, places.layer(layer))
    frozen = chain.over(layer, top)
    node.store.change(row, disk=frozen.to_json())
    old.unlink()
    return frozen.layers


def unfreeze(node: Node, row: SandboxRow) -> None:
    """Undo `_freeze` for a machine that never heard of it, and still writes to what is a layer by name: it is the top
    again. Nothing else lies on that layer yet."""
    places, chain = node.places, chain_of(row)
    back = Chain(of("qcow2").name(), chain.layers[1:])
    os.link(places.layer(chain.layers[0]), places.disk(row.id, back.top))
    node.store.change(row, disk=back.to_json())
    places.disk(row.id, chain.top).unlink(missing_ok=True)  # the layer's name goes with the next sweep
