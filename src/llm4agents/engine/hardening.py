"""What of this host's own settings weakens the walls between sandboxes: for `doctor`.

Reads a dozen files of /proc and /sys and judges them (docs/howto/production-host.md says why); changes nothing.
What is missing of the jail is only what can be asked without making one: `doctor --isolation ID` reads a real one.
Not here: whether sandboxes can run at all (`doctor`), how one of them is confined (`vmm.jail`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from llm4agents.vmm.jail.isolation import landlock_abi

Read = Callable[[str], str | None]
"""The text of a file, stripped; None when it is not there or not ours to read."""
GUIDE = "docs/howto/production-host.md says why, and how"
INOTIFY_WANTED = 1_024
_VULNERABILITIES = "/sys/devices/system/cpu/vulnerabilities"


def found(read: Read, names: Callable[[str], list[str]], *, kvm: bool) -> Iterator[str]:
    """What is not as it should be for hostile code, each in a few words. `kvm`: guests run on this processor itself."""
    if len((read("/proc/swaps") or "").splitlines()) > 1:
        yield "swap is on: guests' memory reaches a disk"
    if read("/sys/kernel/mm/ksm/run") == "1":
        yield "KSM merges pages: guests can tell what others have in memory"
    if kvm:
        if read("/sys/devices/system/cpu/smt/active") == "1":
            yield "SMT is on: two guests may share a core"
        for module in ("kvm_intel", "kvm_amd"):
            if read(f"/sys/module/{module}/parameters/nested") in ("1", "Y"):
                yield f"{module} lets guests be hosts (nested=1)"
        if bad := [
            name
            for name in names(_VULNERABILITIES)
            if (read(f"{_VULNERABILITIES}/{name}") or "").startswith("Vulner")
        ]:
            yield f"the processor is vulnerable: {', '.join(bad)}"
    if read("/proc/sys/vm/overcommit_memory") == "2":
        yield "vm.overcommit_memory=2 charges every clone its template's memory"
    instances = read("/proc/sys/fs/inotify/max_user_instances")
    if instances is not None and instances.isdigit() and int(instances) < INOTIFY_WANTED:
        yield f"beyond {instances} sandboxes a moved deadline is seen a second late (fs.inotify.max_user_instances)"
    groups = (read("/sys/fs/cgroup/cgroup.controllers") or "").split()
    if not {"memory", "pids"} <= set(groups):
        yield "no cgroup v2 with memory and pids: only limits of the process bound a VMM"


def jail(read: Read, *, root: bool, landlock: int) -> Iterator[str]:
    """What of a VMM's jail this host cannot give, each in a few words. `landlock`: its version here, 0 for none."""
    if not landlock:
        yield "the kernel has no landlock (`lsm=landlock,…`)"
    if root:
        return
    yield "VMMs have our own uid: only root gives each one of its own"
    for path, bad, what in (
        ("/proc/sys/user/max_user_namespaces", "0", "user namespaces are switched off"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "user namespaces are root's alone"),
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1", "AppArmor restricts user namespaces"),
    ):
        if read(path) == bad:
            name = path.removeprefix("/proc/sys/").replace("/", ".")
            yield f"{what} ({name}={bad}): no namespaces, no root of its own"


def jail_here() -> list[str]:
    """The same of this host and user."""
    return list(jail(_read, root=os.geteuid() == 0, landlock=landlock_abi()))


def here(*, kvm: bool) -> list[str]:
    """The same of this host."""
    return list(found(_read, _names, kvm=kvm))


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except (OSError, ValueError):
        return None


def _names(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))  # noqa: PTH208
    except OSError:
        return []
