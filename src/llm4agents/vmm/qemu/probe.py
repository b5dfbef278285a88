"""What this host can do with QEMU, by proof: its version, whether KVM really runs a guest.

`/dev/kvm` can open and be of no use (nested, paravirtual hosts), so a kernel is booted with it to its first
byte on the serial line within a deadline. The answer is kept in the cache directory under everything it
depends on: QEMU, kernel, host kernel and boot. Delete that directory to ask again.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

from llm4agents.errors import HostSetupError
from llm4agents.vmm import host

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
    status, out, err = await host.run([qemu, "--version"], _VERSION_TIMEOUT_S)
    first = out.decode(errors="replace").partition("\n")[0]
    if status != 0 or "version " not in first:
        words = (err or out).decode(errors="replace").strip()[-500:] or f"status {status}"
        raise HostSetupError(
            f"{qemu} does not run: {words}",
            hint="reinstall the package qemu-system-x86",
        )
    return first.partition("version ")[2].strip()


async def why_not_kvm(qemu: str, version: str, cache: Path, kernel: Path | None = None) -> str | None:
    """None when KVM runs a guest here, else the reason in words.

    `kernel` (an ELF vmlinux) is what is booted; without one, a few instructions of our own.
    """
    image = "stub" if kernel is None else host.file_identity(kernel)
    return await host.why_not_kvm(cache, "kvm", [qemu, version, image], lambda: _boot(qemu, "kvm", kernel))


async def _boot(qemu: str, accelerator: str, kernel: Path | None) -> str | None:
    """Boot to the first byte on the serial line: None, or why it did not come."""
    with tempfile.NamedTemporaryFile(prefix="llm4agents-probe-") as stub:
        stub.write(host.stub_kernel())
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
        return await host.first_word(process, "QEMU", None)
