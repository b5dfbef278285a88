"""The jailer's command line and where it makes its root. Pure.

Not here: making and removing those directories (`jail`), starting it (the shim, `vmm.shim.Launcher`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from llm4agents.vmm.firecracker import api

ID: Final = "vm"
"""Every machine's: its jail has a base directory of its own."""
FILES_MAX: Final = 1024
LOG: Final = ("--level", "Error", "--module", "vmm")
"""Of the VMM itself: its API server would write a line into the guest's console for every state that is saved."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the jailer puts what it makes below `base`."""

    base: Path
    program: str
    """File name of the Firecracker binary."""

    @property
    def root(self) -> Path:
        """What the VMM sees as `/`."""
        return self.base / self.program / ID / "root"

    def inside(self, name: str) -> Path:
        return self.root / name


def argv(
    jailer: str,
    firecracker: str,
    layout: Layout,
    *,
    uid: int,
    netns: str,
    file_bytes_max: int,
) -> tuple[str, ...]:
    """`netns`: a path to the namespace. `file_bytes_max`: the largest file it may write.

    Not asked for: a pid namespace of its own, and a cgroup (the shim makes both: so the VMM stays its child, and what
    is left is removed by who waits for it), a daemon.
    """
    words = [jailer, "--id", ID, "--exec-file", firecracker, "--uid", str(uid), "--gid", str(uid)]
    words += ["--chroot-base-dir", str(layout.base), "--netns", netns]
    words += ["--resource-limit", f"fsize={file_bytes_max}", "--resource-limit", f"no-file={FILES_MAX}"]
    return (*words, "--", "--api-sock", api.API_SOCKET, *LOG)
