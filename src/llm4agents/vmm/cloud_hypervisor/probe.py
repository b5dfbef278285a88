"""What this host can do with Cloud Hypervisor, by proof: its version, and whether KVM really runs a guest under it.

As with QEMU: a few instructions of our own are booted to their first byte on the serial line within
a deadline, and the answer is kept under everything it depends on.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import shutil
import stat
import tempfile
from pathlib import Path

from llm4agents import limits
from llm4agents.errors import HostSetupError
from llm4agents.vmm import host as shared
from llm4agents.vmm import procfs
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
        process = await asyncio.create_subprocess_exec(
            binary,
            "--version",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
    except OSError as error:
        raise HostSetupError(f"{binary} does not run: {error.strerror}") from error
    try:
        said, _ = await asyncio.wait_for(process.communicate(), _VERSION_TIMEOUT_S)
    except TimeoutError:
        raise HostSetupError(f"{binary} did not answer in {_VERSION_TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    number, full = versions.parse(said.decode(errors="replace"))
    versions.check(number, full)
    return full


def device_gid() -> int | None:
    """The group a VMM needs for /dev/kvm, which it opens by name; None when anyone may open it.

    Raises HostSetupError when it is root's alone: no VMM of ours is.
    """
    device = shared.KVM_DEVICE.stat()
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
    reason = _device_problem()
    if reason is not None:
        return reason
    parts = [binary, full, platform.release(), procfs.host_boot_id(), shared.cpu_model()]
    path = cache / f"kvm-ch-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        kept = json.loads(path.read_text())["why_not"]
        return None if kept is None else str(kept)
    reason = await _boot(binary)
    with contextlib.suppress(
        OSError
    ):  # a cache that cannot be written costs the next server a probe, no more
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"why_not": reason, "asked": parts}))
        temporary.rename(path)
    return reason


def _device_problem() -> str | None:
    try:
        os.close(os.open(shared.KVM_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return "there is no /dev/kvm: no hardware virtualisation here, or its kernel module is not loaded"
    except OSError as error:
        return f"/dev/kvm cannot be opened: {error.strerror}"
    return None


async def _boot(binary: str) -> str | None:
    """Boot to the first byte on the serial line: None, or why it did not come. No guest's code is run."""
    with tempfile.NamedTemporaryFile(prefix="llm4agents-probe-") as stub:
        stub.write(shared.stub_kernel())
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
            first = await asyncio.wait_for(process.stdout.read(1), limits.KVM_PROBE_TIMEOUT_S)
            if first:
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
