"""What is measured of a host once and asked by every driver: its processor, its time-stamp counter, its /dev/kvm.

What took long is kept in the cache directory under everything it depends on; delete that directory to ask again.
Not here: whether KVM really runs a guest, which each VMM proves for itself (its `probe`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import platform
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from llm4agents import binaries, limits
from llm4agents.errors import HostSetupError
from llm4agents.vmm import procfs

KVM_DEVICE = Path("/dev/kvm")
STUB_SAYS = b"K"
"""What `stub_kernel` writes to the serial port."""
SILENT = "did not say a word"


async def tsc_khz(cache: Path) -> int:
    """The TSC's frequency, measured once per processor model and kept, so that no rounding changes it."""
    key = hashlib.sha256(cpu_model().encode()).hexdigest()[:16]
    kept = recall(cache / f"tsc-{key}.json")
    if isinstance(kept, dict) and isinstance(kept.get("khz"), int) and kept["khz"] > 0:
        return int(kept["khz"])
    status, out, err = await run([str(binaries.path(binaries.SHIM)), "--tsc"], 10.0)
    if status != 0 or not out.strip().isdigit():
        raise HostSetupError(
            f"the time-stamp counter cannot be measured: {err.decode(errors='replace').strip()}"
        )
    khz = int(out)
    remember(cache / f"tsc-{key}.json", {"khz": khz, "cpu": cpu_model()})
    return khz


def device_problem() -> str | None:
    """Why /dev/kvm cannot be opened, in words; None when it can."""
    try:
        fd = os.open(KVM_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return "there is no /dev/kvm: no hardware virtualisation here, or its kernel module is not loaded"
    except PermissionError:
        return "/dev/kvm may not be opened by this user: add it to the group kvm"
    except OSError as error:
        return f"/dev/kvm cannot be opened: {os.strerror(error.errno or errno.EIO)}"
    os.close(fd)
    return None


def kvm_nests() -> bool:
    """Whether guests of this host's KVM may use KVM themselves."""
    for module in ("kvm_amd", "kvm_intel"):
        with contextlib.suppress(OSError):
            return Path(f"/sys/module/{module}/parameters/nested").read_text().strip() in ("1", "Y")
    return False


def stub_kernel() -> bytes:
    """The smallest PVH kernel: an ELF whose entry writes `K` to the serial port and halts."""
    load = 0x10_0000
    code = bytes.fromhex("baf8030000b04beef4ebfd")  # mov edx,3f8h; mov al,"K"; out; hlt; jmp hlt
    note = struct.pack("<III", 4, 8, 18) + b"Xen\0" + struct.pack("<Q", load)  # XEN_ELFNOTE_PHYS32_ENTRY
    headers = 64 + 2 * 56
    note_at, code_at = headers, 0x1000
    elf = b"\x7fELF" + bytes([2, 1, 1]) + bytes(9)
    elf += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, load, 64, 0, 0, 64, 56, 2, 0, 0, 0)
    elf += struct.pack("<IIQQQQQQ", 1, 5, code_at, load, load, len(code), len(code), 0x1000)
    elf += struct.pack("<IIQQQQQQ", 4, 4, note_at, 0, 0, len(note), len(note), 4)
    return (elf + note).ljust(code_at, b"\0") + code


def cpu_model() -> str:
    """The processor's name; one host's differs from another's where it matters."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def cpu_identity() -> str:
    """The processor as a KVM guest sees it: name and features."""
    flags = ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                flags = " ".join(sorted(line.partition(":")[2].split()))
                break
    return f"{cpu_model()} {hashlib.sha256(flags.encode()).hexdigest()[:12]}"


async def why_not_kvm(
    cache: Path, name: str, depends: list[str], boot: Callable[[], Awaitable[str | None]]
) -> str | None:
    """None when KVM runs a guest here, else the reason in words: what `boot` says, kept in `cache` as `name`.

    The answer is good for what it depends on: `depends`, the host's kernel and boot, its processor. Silence is what a
    very busy host's guest says too, so that is asked again after KVM_PROBE_KEPT_S.
    """
    reason = device_problem()
    if reason is not None:
        return reason
    parts = [*depends, platform.release(), procfs.host_boot_id(), cpu_model()]
    path = cache / f"{name}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}.json"
    kept = recall(path)
    if isinstance(kept, dict) and "why_not" in kept:
        why = None if kept["why_not"] is None else str(kept["why_not"])
        if why is None or SILENT not in why or _age_s(path) < limits.KVM_PROBE_KEPT_S:
            return why
    reason = await boot()
    remember(path, {"why_not": reason, "asked": parts})
    return reason


async def first_word(process: asyncio.subprocess.Process, vmm: str, expected: bytes | None) -> str | None:
    """Of a VMM that boots a kernel, its pipes ours: None when the first byte is there (`expected`, or any), or why not.

    It is ended afterwards.
    """
    assert process.stdout is not None and process.stderr is not None
    try:
        said = await asyncio.wait_for(process.stdout.read(1), limits.KVM_PROBE_TIMEOUT_S)
        if said and expected in (None, said):
            return None
        words = (await asyncio.wait_for(process.stderr.read(2000), 5)).decode(errors="replace").strip()
        await asyncio.wait_for(process.wait(), 5)
        return f"/dev/kvm opens, but {vmm} could not use it: {words or 'it ended without a word'}"
    except TimeoutError:
        return (
            f"/dev/kvm opens, but a kernel started with it {SILENT} in {limits.KVM_PROBE_TIMEOUT_S:g} s: "
            "no hardware virtualisation is passed on to this machine"
        )
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def file_identity(path: Path) -> str:
    """Changes when the file is replaced."""
    stat = path.stat()
    return f"{path} {stat.st_size} {stat.st_mtime_ns}"


def _age_s(path: Path) -> float:
    try:
        return abs(time.time() - path.stat().st_mtime)
    except OSError:
        return float("inf")


async def run(argv: list[str], timeout: float) -> tuple[int, bytes, bytes]:
    """Status, standard output and error of a command that asks nothing. Raises HostSetupError when it takes longer."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout)
    except TimeoutError:
        raise HostSetupError(f"{argv[0]} did not answer in {timeout:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out, err


def recall(path: Path) -> Any:
    """What was kept in `path` (JSON), None when nothing can be read of it."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def remember(path: Path, body: Any) -> None:
    # A cache that cannot be written costs the next server a probe, no more.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(body))
        temporary.rename(path)
