"""What a sandbox needs that an image may lack: its user, mount points, names, certificates. Changes a tree; no I/O.

Everything is done to files as data: an image may have no shell, no libc and no useradd.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping
from typing import NamedTuple

from llm4agents.images.erofs import Inode
from llm4agents.images.oci.manifest import refuse
from llm4agents.images.oci.tree import Tree, split

USER, UID = "user", 1000
HOME = "/home/user"
SHELLS = ("/bin/bash", "/bin/sh", "/bin/ash", "/bin/busybox")
_NO_SHELL = "/sbin/nologin"
_DIRECTORIES = (
    ("/proc", 0o555),
    ("/sys", 0o555),
    ("/dev", 0o755),
    ("/run", 0o755),
    ("/etc", 0o755),
    ("/tmp", 0o1777),  # noqa: S108 (of the guest)
    ("/var", 0o755),
    ("/var/tmp", 0o1777),  # noqa: S108
    ("/home", 0o755),
    ("/root", 0o700),
)
_REAL = ("/proc", "/sys", "/dev", "/run", "/etc")
"""What the guest's agent mounts, or must write to: no link elsewhere."""
_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
)
_SOURCES = ("/usr/local/share/ca-certificates", "/etc/pki/ca-trust/source/anchors")
"""Where the tools that make bundles anew look for more."""
_TEXT_BYTES_MAX = 4_194_304
_SYSTEMD = ("systemd", "init")
_STATUS = "/var/lib/dpkg/status"
STATUS_BYTES_MAX = 67_108_864

Reader = Callable[[Inode], bytes]


class Facts(NamedTuple):
    """What an image turned out to have."""

    shell: str | None
    systemd: bool
    packages: list[tuple[str, str]]


def fit(
    tree: Tree,
    read: Reader,
    *,
    files: Mapping[str, bytes],
    certificates: Mapping[str, bytes],
    bundle: bytes,
    directories: list[str],
    argv: list[str],
    epoch_ns: int,
) -> Facts:
    """Fit the tree out. `read` gives a file's content.

    `files`: by path, written whatever is there; `certificates`: by name, trusted beside what the image trusts, or
    beside `bundle` (PEM) if it trusts nobody; `directories`: of the image's configuration, made if they are missing.
    """
    fitter = _Fitter(tree, read, epoch_ns)
    for path, mode in _DIRECTORIES:
        fitter.directory(path, mode)
    shell = next((path for path in SHELLS if fitter.executable(path)), None)
    fitter.user(shell)
    for path in directories:
        fitter.directory(path, 0o755)
    for path, data in files.items():
        fitter.write(path, data)
    fitter.own()
    fitter.trust(certificates, bundle)
    return Facts(shell, fitter.is_systemd(argv), fitter.packages())


class _Fitter:
    def __init__(self, tree: Tree, read: Reader, epoch_ns: int) -> None:
        self._tree, self._read, self._epoch_ns = tree, read, epoch_ns

    def directory(self, path: str, mode: int, owner: tuple[int, int] = (0, 0)) -> Inode:
        """It is there afterwards; what is there already stays as it is."""
        parts = split(path)
        found = self._tree.find(parts, follow=path not in _REAL)
        if found is not None and found.directory:
            return found
        if found is not None or path in _REAL:
            if found is not None:
                self._tree.note(f"{path} is no directory in the image; a sandbox has one there")
            parent = self._tree.make(parts[:-1]) or refuse(f"it has a file where {path} is to be")
            parent.children.pop(parts[-1], None)
        made = self._tree.make(parts)
        if made is None:
            refuse(f"it has a file where the directory {path} is to be")
        made.mode, made.mtime_ns = stat.S_IFDIR | mode, self._epoch_ns
        made.uid, made.gid = owner
        return made

    def write(
        self,
        path: str,
        data: bytes,
        mode: int = 0o644,
        *,
        owner: tuple[int, int] = (0, 0),
        through: bool = False,
    ) -> None:
        """A file, in place of what is there (`through`: in place of what a link there leads to)."""
        parts = split(path)
        if through:
            parts = self._tree.resolve(parts) or parts
        parent = self._tree.make(parts[:-1])
        if parent is None:
            refuse(f"it has a file where the directory of {path} is to be")
        parent.children[parts[-1]] = Inode(
            stat.S_IFREG | mode, *owner, self._epoch_ns, size=len(data), data=data
        )

    def own(self) -> None:
        """What was put into the user's home is the user's."""
        home = self._tree.find(split(HOME))
        todo = [] if home is None else [child for child in home.children.values() if not child.layer]
        while todo:
            inode = todo.pop()
            assert home is not None
            inode.uid, inode.gid = home.uid, home.gid
            if inode.directory:
                inode.mode = stat.S_IFDIR | 0o700
            todo += [child for child in inode.children.values() if not child.layer]

    def text(self, path: str, most: int = _TEXT_BYTES_MAX) -> bytes | None:
        found = self._tree.find(split(path))
        if found is None or not stat.S_ISREG(found.mode) or found.size > most:
            return None
        return self._read(found)

    def executable(self, path: str) -> bool:
        found = self._tree.find(split(path))
        return found is not None and stat.S_ISREG(found.mode) and bool(found.mode & 0o111)

    # -- who is who

    def user(self, shell: str | None) -> None:
        """The user every sandbox has, its group and its home."""
        passwd = _lines(self.text("/etc/passwd"))
        group = _lines(self.text("/etc/group"))
        shadow = self.text("/etc/shadow")
        if not any(line.startswith(b"root:") for line in passwd):
            passwd.insert(0, f"root:x:0:0:root:/root:{shell or _NO_SHELL}".encode())
        if not any(line.startswith(b"root:") for line in group):
            group.insert(0, b"root:x:0:")
        mine = next((line for line in passwd if line.startswith(f"{USER}:".encode())), None)
        if mine is not None:
            fields = mine.split(b":")
            uid, gid = _number(fields, 2), _number(fields, 3)
            home = fields[5].decode("utf-8", "replace") if len(fields) > 5 else HOME
            if uid != UID:
                self._tree.note(f"the image's user {USER!r} has uid {uid}: commands run as that")
            if home.startswith("/") and ".." not in home.split("/"):
                self.directory(home, 0o755, (uid, gid))
        else:
            # A group of that name, the group of who has the number already, or a new one.
            named = next((line.split(b":") for line in group if line.startswith(f"{USER}:".encode())), None)
            taken = next(
                (_number(line.split(b":"), 3) for line in passwd if _number(line.split(b":"), 2) == UID), None
            )
            gid = _number(named, 2) if named else UID if taken is None else taken
            if named is None and not any(_number(line.split(b":"), 2) == gid for line in group):
                group.append(f"{USER}:x:{gid}:".encode())
            password = "x" if shadow is not None else "*"
            passwd.append(f"{USER}:{password}:{UID}:{gid}::{HOME}:{shell or _NO_SHELL}".encode())
            if shadow is not None:
                shadow_lines = [*_lines(shadow), f"{USER}:!:19000:0:99999:7:::".encode()]
                self._rewrite("/etc/shadow", shadow_lines, 0o640)
            self.directory(HOME, 0o755, (UID, gid))
        self._rewrite("/etc/passwd", passwd, 0o644)
        self._rewrite("/etc/group", group, 0o644)

    def _rewrite(self, path: str, lines: list[bytes], mode: int) -> None:
        there = self._tree.find(split(path))
        owner = (0, 0)
        if there is not None and stat.S_ISREG(there.mode):
            mode, owner = stat.S_IMODE(there.mode), (there.uid, there.gid)
        self.write(path, b"\n".join(lines) + b"\n", mode, owner=owner, through=True)

    # -- whom it trusts

    def trust(self, certificates: Mapping[str, bytes], bundle: bytes) -> None:
        ours = b"".join(data.rstrip(b"\n") + b"\n" for data in certificates.values())
        found = [(path, text) for path in _BUNDLES if (text := self.text(path)) is not None]
        theirs = next((text for _, text in found if b"BEGIN CERTIFICATE" in text), bundle)
        done: set[tuple[bytes, ...]] = set()
        for path, text in [*found, (_BUNDLES[0], theirs)]:
            where = tuple(self._tree.resolve(split(path)) or split(path))
            if where not in done:
                done.add(where)
                self.write(path, text.rstrip(b"\n") + b"\n" + ours, through=True)
        for source in _SOURCES:
            if source == _SOURCES[0] or self._tree.find(split(source)) is not None:
                for name, data in certificates.items():
                    self.write(f"{source}/{name}", data)

    # -- what it is

    def is_systemd(self, argv: list[str]) -> bool:
        """Whether what the image runs is systemd, by the file that its first word leads to."""
        if not argv or argv[0].rpartition("/")[2] not in _SYSTEMD:
            return False
        for path in (argv[0],) if "/" in argv[0] else (f"/sbin/{argv[0]}", f"/usr/lib/systemd/{argv[0]}"):
            where = self._tree.resolve(split(path))
            if where and where[-1] == b"systemd" and self.executable(path):
                return True
        return False

    def packages(self) -> list[tuple[str, str]]:
        found = []
        for stanza in (self.text(_STATUS, STATUS_BYTES_MAX) or b"").split(b"\n\n"):
            fields = dict(
                line.split(b": ", 1)
                for line in stanza.split(b"\n")
                if line.startswith((b"Package: ", b"Status: ", b"Version: "))
            )
            if b"Package" in fields and fields.get(b"Status", b"").endswith(b" installed"):
                found.append((_plain(fields[b"Package"]), _plain(fields.get(b"Version", b""))))
        return sorted(found)


def _plain(text: bytes) -> str:
    return text[:256].decode("ascii", "replace")


def _lines(text: bytes | None) -> list[bytes]:
    return [line for line in (text or b"").split(b"\n") if line]


def _number(fields: list[bytes], at: int) -> int:
    text = fields[at] if len(fields) > at else b""
    return int(text) if text.isdigit() and len(text) <= 10 else 0
