"""The initramfs: the guest agent as /init, the modules, and the list of them that the agent loads by.

Uncompressed: unpacking is then a copy, and in emulation a second of inflating is two of waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llm4agents.errors import HostSetupError
from llm4agents.images import cpio
from llm4agents.images.cache import Cache
from llm4agents.images.kernel import Kernel

MODULES_DIRECTORY = "modules"


@dataclass(frozen=True, slots=True)
class Initrd:
    path: Path
    digest: str


def assemble(
    agent: bytes, modules: list[tuple[str, bytes]], nested: Sequence[tuple[str, bytes]] = ()
) -> bytes:
    """The archive: `/init`, `/modules/NAME.ko`, and `/modules.order`, their paths in load order. Pure.

    `nested`: modules of `/modules.nested`, the list that makes the agent set up a machine that may run machines.
    """
    more = [cpio.file("modules.nested", _order(nested))] if nested else []
    return cpio.archive(
        [
            *(cpio.directory(name) for name in ("dev", "proc", "sys", "run", "root", MODULES_DIRECTORY)),
            # /init starts with this as its stdin, stdout and stderr, before it has mounted anything.
            cpio.char_device("dev/console", 5, 1),
            cpio.char_device("dev/null", 1, 3, 0o666),
            cpio.file("init", agent, 0o755),
            cpio.file("modules.order", _order(modules)),
            *more,
            *(cpio.file(f"{MODULES_DIRECTORY}/{name}.ko", data) for name, data in (*modules, *nested)),
        ]
    )


def _order(modules: Sequence[tuple[str, bytes]]) -> bytes:
    return "".join(f"/{MODULES_DIRECTORY}/{name}.ko\n" for name, _ in modules).encode()


def build_initrd(kernel: Kernel, agent: Path, cache: Cache, *, nested: bool = False) -> Initrd:
    """The initramfs of `kernel` with that agent, as a blob; equal inputs give the same file.

    `nested`: for a machine that may run machines, with the modules for that.
    """
    binary = agent.read_bytes()
    if binary[:4] != b"\x7fELF":
        raise HostSetupError(f"{agent} is not an ELF binary", hint="run scripts/bootstrap")
    every, more = (
        [(name, path.read_bytes()) for name, path in part]
        for part in (kernel.modules, kernel.nested if nested else ())
    )
    data = assemble(binary, every, more)
    digest, path = cache.ingest_bytes(data)
    return Initrd(path, digest)
