"""Layers put upon each other as one tree in memory: whiteouts, links, replaced files. Nothing of it is on a disk.

So a link can lead nowhere but within the tree, whatever a layer writes through it. Pure but for the sizes it counts.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable

from llm4agents import limits
from llm4agents.errors import CapacityError
from llm4agents.images.erofs import Inode, storable
from llm4agents.images.oci.manifest import refuse
from llm4agents.images.oci.members import Member, shown

_WHITEOUT, _OPAQUE, _OTHERS = b".wh.", b".wh..wh..opq", b".wh..wh."
_LINKS_MAX = 40
_KEPT = (b"user.", b"system.posix_acl_")
_CAPABILITY = b"security.capability"


class Tree:
    def __init__(self) -> None:
        self.root = Inode(stat.S_IFDIR | 0o755, 0, 0, 0)
        self.notes: list[str] = []
        self._entries = 0
        self._bytes = 0

    def add_layer(self, members: Iterable[Member], layer: int, spool: int) -> None:
        """Put a layer upon what there is. Raises InvalidRequestError, CapacityError (too much of it)."""
        found: list[Member] = []
        gone: list[Member] = []
        for member in members:
            self._counted(member.size)
            base = member.path[-1] if member.path else b""
            if any(part.startswith(_WHITEOUT) for part in member.path[:-1]):
                if any(part.startswith(_OTHERS) for part in member.path):
                    continue  # what aufs kept for itself
                refuse(f"layer {layer} has something below a whiteout: {_path(member.path)}")
            (gone if base.startswith(_WHITEOUT) else found).append(member)
        # Whiteouts are about the layers below, wherever in this one they come.
        for member in gone:
            self._whiteout(member, layer)
        for member in found:
            self._put(member, layer, spool)

    def _counted(self, size: int) -> None:
        self._entries += 1
        self._bytes += size
        if self._entries > limits.OCI_ENTRIES_MAX or self._bytes > limits.OCI_UNPACKED_BYTES_MAX:
            raise CapacityError(
                f"the image has more than {limits.OCI_ENTRIES_MAX:,} files "
                f"or {limits.OCI_UNPACKED_BYTES_MAX >> 30} GiB in all its layers",
                hint="make a smaller one, or one of fewer layers",
            )

    def note(self, text: str) -> None:
        if len(self.notes) < limits.OCI_NOTES_MAX and text not in self.notes:
            self.notes.append(text)

    def _whiteout(self, member: Member, layer: int) -> None:
        *parents, base = member.path
        if base.startswith(_OTHERS) and base != _OPAQUE:
            return
        parent = self.find(parents)
        if parent is None or not parent.directory:
            return
        if base == _OPAQUE:
            parent.children.clear()
            return
        name = base[len(_WHITEOUT) :]
        if name in (b"", b".", b".."):
            refuse(f"layer {layer} has a whiteout of nothing: {_path(member.path)}")
        parent.children.pop(name, None)

    def _put(self, member: Member, layer: int, spool: int) -> None:
        if not member.path:
            self._describe(self.root, member, layer)
            return
        *parents, base = member.path
        parent = self.make(parents)
        if parent is None:
            refuse(f"layer {layer} has {_path(member.path)} below what is no directory")
        there = parent.children.get(base)
        if member.kind == stat.S_IFDIR and there is not None and there.directory:
            self._describe(there, member, layer)
            return
        if not member.kind:
            first = self._linked(member, layer)
            parent.children[base] = first
            return
        inode = Inode(
            member.kind, 0, 0, 0, size=member.size, at=member.at, extents=member.extents, spool=spool
        )
        if member.kind == stat.S_IFLNK:
            inode.target, inode.size = member.link, len(member.link)
        self._describe(inode, member, layer)
        parent.children[base] = inode

    def _linked(self, member: Member, layer: int) -> Inode:
        parts = [part for part in member.link.split(b"/") if part not in (b"", b".")]
        first = None if b".." in parts or not parts else self.find(parts, follow=False)
        if first is None or first.directory:
            refuse(
                f"layer {layer} has {_path(member.path)}, a hard link to what is no file of it: {shown(member.link)}"
            )
        return first

    def _describe(self, inode: Inode, member: Member, layer: int) -> None:
        mode = 0o777 if member.kind == stat.S_IFLNK else member.mode
        inode.mode = stat.S_IFMT(inode.mode) | mode
        inode.uid, inode.gid, inode.mtime_ns, inode.layer = member.uid, member.gid, member.mtime_ns, layer
        kept = {}
        for name, value in (member.attributes or {}).items():
            if (name == _CAPABILITY or name.startswith(_KEPT)) and storable(name, value):
                kept[name] = value
            else:
                self.note(f"{_path(member.path)}: its extended attribute {shown(name)} is left out")
        if member.attributes is not None or inode.directory:
            inode.attributes = kept or None

    # -- finding one's way: links lead within the tree, `..` of the root is the root

    def find(self, parts: list[bytes], *, follow: bool = True) -> Inode | None:
        """What is at that path, None if nothing. `follow`: whether the last part is followed if it is a link."""
        return self._walk(parts, make=False, follow=follow)

    def make(self, parts: list[bytes]) -> Inode | None:
        """The directory at that path, made (root's, 0755) as far as it is missing; None if something else is there."""
        found = self._walk(parts, make=True, follow=True)
        return found if found is not None and found.directory else None

    def resolve(self, parts: list[bytes]) -> list[bytes] | None:
        """The path without links of where `parts` lead; of what is not there yet too, if its directory is."""
        trail = self._trail(parts, make=False, follow=True, missing=True)
        return None if trail is None else [name for name, _ in trail[1:]]

    def _walk(self, parts: list[bytes], *, make: bool, follow: bool) -> Inode | None:
        trail = self._trail(parts, make=make, follow=follow, missing=False)
        return trail[-1][1] if trail else None

    def _trail(
        self, parts: list[bytes], *, make: bool, follow: bool, missing: bool
    ) -> list[tuple[bytes, Inode]] | None:
        trail: list[tuple[bytes, Inode]] = [(b"", self.root)]
        todo = list(reversed(parts))
        links = 0
        while todo:
            name = todo.pop()
            if name in (b"", b"."):
                continue
            if name == b"..":
                if len(trail) > 1:
                    trail.pop()
                continue
            here = trail[-1][1]
            if not here.directory:
                return None
            child = here.children.get(name)
            if child is None and make:
                child = here.children[name] = Inode(stat.S_IFDIR | 0o755, 0, 0, here.mtime_ns)
                self._counted(0)
            if child is None:
                if missing and not todo:
                    return [*trail, (name, here)]
                return None
            if stat.S_ISLNK(child.mode) and (todo or follow):
                links += 1
                if links > _LINKS_MAX:
                    return None
                if child.target.startswith(b"/"):
                    del trail[1:]
                todo += reversed(child.target.split(b"/"))
                continue
            trail.append((name, child))
        return trail


def split(path: str) -> list[bytes]:
    """The components of a path."""
    return [part.encode("utf-8", "surrogateescape") for part in path.split("/") if part not in ("", ".")]


def _path(parts: list[bytes]) -> str:
    return "/" + shown(b"/".join(parts))
