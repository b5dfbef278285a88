"""What this host can do with Firecracker, by proof: its binaries, its version, whether KVM really runs a guest.

`/dev/kvm` can open and be of no use (nested, paravirtual hosts), so a few instructions of our own are run by
Firecracker itself until they have said a byte on the serial line, within a deadline. The answer is kept in the cache
directory under everything it depends on. Delete that directory to ask again.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from pathlib import Path

from llm4agents.errors import HostSetupError
from llm4agents.vmm import host
from llm4agents.vmm.firecracker import versions

_VERSION_TIMEOUT_S = 20.0
_HINT = f"install a release of Firecracker ({versions.ADVISED} or later): both `firecracker` and `jailer`"


def find(name: str) -> str:
    """The absolute path of one of the two binaries. Raises HostSetupError."""
    found = shutil.which(name)
    if found is None:
        raise HostSetupError(f"{name} is not installed", hint=_HINT)
    return str(Path(found).resolve())


async def version(firecracker: str, jailer: str) -> versions.Version:
    """That of both; raises HostSetupError when one does not run, or they are of different ones."""
    said = []
    for binary in (firecracker, jailer):
        status, out, err = await host.run([binary, "--version"], _VERSION_TIMEOUT_S)
        if status != 0:
            words = (err or out).decode(errors="replace").strip()[-500:] or f"status {status}"
            raise HostSetupError(f"{binary} does not run: {words}", hint=_HINT)
        said.append(versions.parse(out.decode(errors="replace")))
    if said[0] != said[1]:
        raise HostSetupError(
            f"{firecracker} and {jailer} are of different versions",
            hint="install both from one release",
        )
    return said[0]


async def why_not_kvm(firecracker: str, cache: Path) -> str | None:
    """None when KVM runs a guest here, else the reason in words."""
    binary = host.file_identity(Path(firecracker))
    return await host.why_not_kvm(cache, "firecracker", [binary], lambda: _boot(firecracker))


async def _boot(firecracker: str) -> str | None:
    """Run our instructions to the first byte on the serial line: None, or why it did not come."""
    with tempfile.TemporaryDirectory(prefix="llm4agents-probe-") as directory:
        kernel, config = Path(directory) / "kernel", Path(directory) / "config"
        kernel.write_bytes(host.stub_kernel())
        config.write_text(
            json.dumps(
                {
                    "boot-source": {"kernel_image_path": str(kernel), "boot_args": ""},
                    "machine-config": {"vcpu_count": 1, "mem_size_mib": 128},
                    "drives": [],
                }
            )
        )
        process = await asyncio.create_subprocess_exec(
            *(firecracker, "--no-api", "--config-file", str(config), "--level", "Off"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
            cwd=directory,
        )
        return await host.first_word(process, "Firecracker", host.STUB_SAYS)
