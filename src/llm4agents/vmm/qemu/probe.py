"""What this host can do, by proof: QEMU's version, whether KVM really runs a guest, the TSC's frequency.

`/dev/kvm` can open and be of no use (nested, paravirtual hosts), so a kernel is booted with it to its first
byte on the serial line within a deadline. The answer is kept in the cache directory under everything it
depends on: QEMU, kernel, host kernel and boot. Delete that directory to ask again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

from llm4agents import binaries, limits
from llm4agents.errors import HostSetupError
from llm4agents.vmm import procfs

KVM_DEVICE = Path("/dev/kvm")
_VERSION_TIMEOUT_S = 20.0


def find_qemu(name: str) -> str:
    """The absolute path of QEMU. Raises HostSetupError naming the package."""
    found = shutil.which(name)
    if found is None:
        raise HostSetupError(
            f"{name} is not installed",
            hint="install QEMU: apt install qemu-system-x86 (llm4agents setup does it)",
            packages=["qemu-system-x86"],
        )
    return str(Path(found).resolve())


async def qemu_version(qemu: str) -> str:
    """`7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)`. Raises HostSetupError when it does not run."""
    status, out, err = await _run([qemu, "--version"], _VERSION_TIMEOUT_S)
    first = out.decode(errors="replace").partition("\n")[0]
    if status != 0 or "version " not in first:
        words = (err or out).decode(errors="replace").strip()[-500:] or f"status {status}"
        raise HostSetupError(
            f"{qemu} does not run: {words}",
            hint="reinstall the package qemu-system-x86",
        )
    return first.partition("version ")[2].strip()


async def tsc_khz(cache: Path) -> int:
    """The TSC's frequency, measured once per processor model and kept, so that no rounding changes it."""
    key = hashlib.sha256(cpu_model().encode()).hexdigest()[:16]
    kept = _read(cache / f"tsc-{key}.json")
    if isinstance(kept, dict) and isinstance(kept.get("khz"), int) and kept["khz"] > 0:
        return int(kept["khz"])
    status, out, err = await _run([str(binaries.path(binaries.SHIM)), "--tsc"], 10.0)
    if status != 0 or not out.strip().isdigit():
        raise HostSetupError(
            f"the time-stamp counter cannot be measured: {err.decode(errors='replace').strip()}"
        )
    khz = int(out)
    _write(cache / f"tsc-{key}.json", {"khz": khz, "cpu": cpu_model()})
    return khz


async def why_not_kvm(qemu: str, version: str, cache: Path, kernel: Path | None = None) -> str | None:
    """None when KVM runs a guest here, else the reason in words.

    `kernel` (an ELF vmlinux) is what is booted; without one, a few instructions of our own.
    """
    reason = _device_problem()
    if reason is not None:
        return reason
    image = "stub"
    if kernel is not None:
        stat = kernel.stat()
        image = f"{kernel} {stat.st_size} {stat.st_mtime_ns}"
    parts = [qemu, version, image, platform.release(), procfs.host_boot_id(), cpu_model()]
    path = cache / f"kvm-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}.json"
    kept = _read(path)
    if isinstance(kept, dict) and "why_not" in kept:
        return None if kept["why_not"] is None else str(kept["why_not"])
    reason = await _boot(qemu, "kvm", kernel)
    _write(path, {"why_not": reason, "asked": parts})
    return reason


def _device_problem() -> str | None:
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


async def _boot(qemu: str, accelerator: str, kernel: Path | None) -> str | None:
    """Boot to the first byte on the serial line: None, or why it did not come."""
    with tempfile.NamedTemporaryFile(prefix="llm4agents-probe-") as stub:
        stub.write(stub_kernel())
        stub.flush()
        args = [qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-m", "256M"]
        args += ["-M", "microvm,acpi=on,pic=off,pit=off,rtc=on,isa-serial=on", "-accel", accelerator]
        args += ["-cpu", "host" if accelerator == "kvm" else "max", "-serial", "stdio"]
        args += ["-kernel", str(kernel or stub.name), "-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1"]
        process = await asyncio.create_subprocess_exec(
            *args,
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
            return f"/dev/kvm opens, but QEMU could not use it: {words or 'it ended without a word'}"
        except TimeoutError:
            return (
                "/dev/kvm opens, but a kernel started with it did not say a word in"
                f" {limits.KVM_PROBE_TIMEOUT_S:g} s: no hardware virtualisation is passed on to this machine"
            )
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


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


async def _run(argv: list[str], timeout: float) -> tuple[int, bytes, bytes]:
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


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _write(path: Path, body: Any) -> None:
    # A cache that cannot be written costs the next server a probe, no more.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(body))
        temporary.rename(path)
