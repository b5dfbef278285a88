"""What this host can do with Cloud Hypervisor, by proof: its version, and whether KVM really runs a guest under it.

As with QEMU: a few instructions of our own are booted to their first byte on the serial line within
a deadline, and the answer is kept under everything it depends on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import platform
import shutil
import stat
import tempfile
from pathlib import Path

from llm4agents import limits
from llm4agents.errors import HostSetupError
from llm4agents.vmm import host, procfs
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
    reason = host.device_problem()
    if reason is not None:
        return reason
    found = Path(binary).stat()
    parts = [
        f"{binary} {found.st_size} {found.st_mtime_ns}",
        full,
        platform.release(),
        procfs.host_boot_id(),
        host.cpu_model(),
    ]
    path = cache / f"kvm-ch-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}.json"
    kept = host.recall(path)
    if isinstance(kept, dict) and "why_not" in kept:
        return None if kept["why_not"] is None else str(kept["why_not"])
    reason = await _boot(binary)
    host.remember(path, {"why_not": reason, "asked": parts})
    return reason


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
        try:
            assert process.stdout is not None and process.stderr is not None
            said = await asyncio.wait_for(process.stdout.read(1), limits.KVM_PROBE_TIMEOUT_S)
            if said == host.STUB_SAYS:
                return None
            words = (await asyncio.wait_for(process.stderr.read(2000), 5)).decode(errors="replace").strip()
            await asyncio.wait_for(process.wait(), 5)
            return (
                f"/dev/kvm opens, but Cloud Hypervisor could not use it: {words or 'it ended without a word'}"
            )
        except TimeoutError:
            return (
                "/dev/kvm opens, but a kernel started with it did not say a word in"
                f" {limits.KVM_PROBE_TIMEOUT_S:g} s: no hardware virtualisation is passed on to this machine"
            )
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
