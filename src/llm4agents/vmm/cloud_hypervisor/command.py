"""The command line of Cloud Hypervisor and the jail's places, as pure functions. No I/O.

Everything else is said over its API (`api`), whose listening socket it inherits.
"""

from __future__ import annotations

from llm4agents.vmm.cloud_hypervisor import api

API_FD = 3
DEVICES = ("/dev/kvm", api.URANDOM)
PLACES = (
    *DEVICES,
    f"{api.IO}/",
    f"{api.BOOT_DIRECTORY}/{api.KERNEL}",
    f"{api.BOOT_DIRECTORY}/{api.INITRD}",
    api.MEMORY,
    *(api.disk_path(slot) for slot in api.SLOTS),
)
"""Mount points of its root, empty until they are bound to what one machine gets; one is a directory."""


def argv(binary: str) -> tuple[str, ...]:
    """Seccomp: a system call outside its own list ends it."""
    return (binary, "--api-socket", f"fd={API_FD}", "--seccomp", "true")
