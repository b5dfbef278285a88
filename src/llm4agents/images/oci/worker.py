"""The process that reads an image's layers: `python -m llm4agents.images.oci.worker JOB`, its end on stdout.

Layers are a stranger's. They are read here and not in the server: after its files are open this process is nobody, in
an empty root where it may be, with bounds on memory, time and what it writes. It opens no file by a name from a layer.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import os
import resource
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from llm4agents import limits
from llm4agents.errors import LLM4AgentsError, to_wire
from llm4agents.images import erofs
from llm4agents.images.erofs import Inode
from llm4agents.images.oci import fitting, members, unpack
from llm4agents.images.oci.manifest import refuse
from llm4agents.images.oci.tree import Tree

_NOBODY = 65_534
_PR_SET_NO_NEW_PRIVS = 38
UUID = b"llm4agents-oci\0\1"


def confine(root: Path) -> None:
    """From here on nothing can be opened by name (as root), and nothing gained."""
    if os.geteuid() == 0:
        os.chroot(root)
        os.chdir("/")
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for what, most in (
        (resource.RLIMIT_AS, limits.OCI_WORKER_MEMORY_BYTES),
        (resource.RLIMIT_CPU, limits.OCI_WORKER_CPU_S),
        (resource.RLIMIT_FSIZE, limits.OCI_UNPACKED_BYTES_MAX + limits.OCI_LAYER_BYTES_MAX),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


class Job:
    """`layers`: open files of the layers as they are kept; `spools`: as many empty ones; `out`: for the image."""

    def __init__(
        self,
        said: dict[str, Any],
        layers: list[BinaryIO],
        spools: list[BinaryIO],
        out: BinaryIO,
        tell: Callable[[str, float], None],
    ) -> None:
        self._said, self._layers, self._spools, self._out, self._tell = said, layers, spools, out, tell

    def run(self) -> dict[str, Any]:
        """Raises LLM4AgentsError."""
        tree = Tree()
        left = limits.OCI_UNPACKED_BYTES_MAX
        tars: list[BinaryIO] = []
        diffs = self._said["diffs"]
        for number, (source, spool, diff) in enumerate(
            zip(self._layers, self._spools, diffs, strict=True), 1
        ):
            name = f"layer {number}"
            self._tell(f"unpacking layer {number} of {len(diffs)}", 0.5 * (number - 1) / len(diffs))
            if unpack.kind(source) == "tar":
                tar, size, digest = source, os.fstat(source.fileno()).st_size, _digest(source)
                left -= size
            else:
                size, digest = unpack.unpack(source, spool, left, name)
                tar, left = spool, left - size
            if digest != diff:
                refuse(f"{name} unpacks to sha256:{digest}, and its configuration says sha256:{diff}")
            tars.append(tar)
            tree.add_layer(members.read(tar, size, name), number, len(tars) - 1)
        facts = fitting.fit(
            tree,
            lambda inode: _content(inode, tars),
            files=_bytes(self._said["files"]),
            certificates=_bytes(self._said["certificates"]),
            bundle=base64.b64decode(self._said["bundle"]),
            directories=self._said["directories"],
            argv=self._said["argv"],
            epoch_ns=self._said["epoch_ns"],
        )
        self._tell("writing the EROFS image", 0.5)
        erofs.write(
            tree.root,
            tars,
            self._out,
            uuid=UUID,
            label=b"image",
            progress=lambda done: self._tell("writing the EROFS image", 0.5 + done / 2),
        )
        self._out.flush()
        return {
            "shell": facts.shell,
            "systemd": facts.systemd,
            "packages": facts.packages,
            "notes": tree.notes,
        }


def _bytes(found: dict[str, str]) -> dict[str, bytes]:
    return {name: base64.b64decode(data) for name, data in found.items()}


def _content(inode: Inode, spools: list[BinaryIO]) -> bytes:
    assert stat.S_ISREG(inode.mode)
    return erofs.content(inode, spools, 0, inode.size)


def _digest(file: BinaryIO) -> str:
    file.seek(0)
    digest = hashlib.sha256()
    while piece := file.read(1_048_576):
        digest.update(piece)
    return digest.hexdigest()


def main() -> None:
    said = json.loads(Path(sys.argv[1]).read_bytes())
    here = Path.cwd()
    layers: list[BinaryIO] = [Path(path).open("rb") for path in said["layers"]]  # noqa: SIM115
    spools: list[BinaryIO] = []
    for number in range(len(layers)):
        path = here / f"spool{number}"
        spools.append(path.open("x+b"))
        path.unlink()
    out = (here / said["out"]).open("xb")
    if any(unpack.kind(layer) == "zstd" for layer in layers):
        unpack.library()
    empty = here / "empty"
    empty.mkdir(mode=0o500)
    answer: dict[str, Any]
    try:
        confine(empty)
        answer = Job(said, layers, spools, out, _tell).run()
    except LLM4AgentsError as error:
        answer = {"error": to_wire(error)}
    except MemoryError:
        answer = {"error": {"code": "capacity", "detail": "reading the image takes too much memory"}}
    except OSError as error:
        answer = {"error": {"code": "capacity", "detail": f"the image could not be written: {error}"}}
    sys.stdout.write(json.dumps(answer))


def _tell(words: str, done: float) -> None:
    sys.stderr.write(f"{done:.4f} {words}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
