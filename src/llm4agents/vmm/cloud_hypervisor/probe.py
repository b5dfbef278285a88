"""What this host can do with Cloud Hypervisor, by proof: its version, and whether KVM really runs a guest under it.

As with QEMU: a few instructions of our own are booted to their first byte on the serial line within
a deadline, and the answer is kept under everything it depends on.
"""

from __future__ import annotations

import asyncio
import shutil
import stat
import tempfile
from pathlib import Path

from llm4agents.errors import HostSetupError
from llm4agents.vmm import host
from llm4agents.vmm.cloud_hypervisor import versions

_VERSION_TIMEOUT_S = 20.0


def find(name: str) -> str:
    """The absolute path of the binary. Raises HostSetupError."""
    found = shutil.which(name)
    if found is None:
        raise HostSetupError(
            f"{name} is not installed",
            hint=f"install Cloud Hypervisor {versions.OLDEST[0]} or newer and put it on PATH,"
            " or set LLM4AGENTS_CLOUD_HYPERVISOR to the binary",
        )
    return str(Path(found).resolve())


async def version(binary: str) -> str:
    """`53.0.0`. Raises HostSetupError when it does not run, is something else or too old."""
    try:
        _, out, err = await host.run([binary, "--version"], _VERSION_TIMEOUT_S)
    except OSError as error:
        raise HostSetupError(f"{binary} does not run: {error.strerror}") from error
    number, full = versions.parse((out or err).decode(errors="replace"))
    versions.check(number, full)
    return full


def device_gid() -> int | None:
    """The group a VMM needs for /dev/kvm, which it opens by name; None when anyone may open it.

    Raises HostSetupError when it is root's alone: no VMM of ours is.
    """
    device = host.KVM_DEVICE.stat()
    if device.st_mode & (stat.S_IROTH | stat.S_IWOTH) == stat.S_IROTH | stat.S_IWOTH:
        return None
    if device.st_gid != 0 and device.st_mode & 0o060 == 0o060:
        return device.st_gid
    raise HostSetupError(
        "/dev/kvm may be opened by root alone, and no virtual machine monitor runs as root here",
        hint="give it a group: groupadd -f kvm && chgrp kvm /dev/kvm && chmod 0660 /dev/kvm",
    )


async def why_not_kvm(binary: str, full: str, cache: Path) -> str | None:
    """None when KVM runs a guest here, else the reason in words."""
    depends = [host.file_identity(Path(binary)), full]
    return await host.why_not_kvm(cache, "kvm-ch", depends, lambda: _boot(binary))


async def _boot(binary: str) -> str | None:
    """Boot to the first byte on the serial line: None, or why it did not come. No guest's code is run."""
    with tempfile.NamedTemporaryFile(prefix="llm4agents-probe-") as stub:
        stub.write(host.stub_kernel())
        stub.flush()
        process = await asyncio.create_subprocess_exec(
            binary,
            *("--kernel", stub.name, "--memory", "size=64M", "--cpus", "boot=1,nested=off"),
            *("--serial", "tty", "--console", "off"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return await host.first_word(process, "Cloud Hypervisor", host.STUB_SAYS)
