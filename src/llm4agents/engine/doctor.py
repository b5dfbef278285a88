"""Can this host do the main job, and if not, what is missing. Works without a server and without QEMU.

Reads and probes; changes nothing but the probe's cache.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

from llm4agents import binaries, limits
from llm4agents.config import Settings
from llm4agents.engine import admission, hardening, network, parts
from llm4agents.engine import host as hosts
from llm4agents.errors import LLM4AgentsError
from llm4agents.images.cache import Cache
from llm4agents.images.process import PATH
from llm4agents.vmm.base import Capabilities
from llm4agents.vmm.choice import LABELS, Drivers, Found, choose
from llm4agents.vmm.jail import cell, cgroups

TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "mkfs.erofs": "erofs-utils",
    "mke2fs": "e2fsprogs",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
}
"""Host tools, and the Debian package that brings each."""
UNPRIVILEGED = {"newuidmap": "uidmap", "fakeroot": "fakeroot"}
"""What building templates needs besides when it is not done by root."""
SLOWDOWN = (
    "code runs about 8 to 13 times slower than native, starting a process 35 times; its kernel is its own"
)
NEEDED_MIB = limits.DEFAULT_MEMORY_MIB + limits.TB_SIZE_MIB + admission.VMM_MIB + 256
"""For one that uses all it has, and 256 MiB for the host itself."""
DISK_BYTES_NEEDED = 8 << 30
"""For building both templates from nothing."""


def report(settings: Settings) -> dict[str, Any]:
    """The report of docs/design/interfaces.md. Takes seconds the first time (the KVM probe), then a fraction."""
    return asyncio.run(report_async(settings))


async def report_async(settings: Settings) -> dict[str, Any]:
    checks: list[dict[str, Any]] = []

    def check(name: str, ok: bool, detail: str, hint: str | None = None, *, required: bool = True) -> None:
        checks.append(
            {"name": name, "ok": ok, "required": required, "detail": detail, "hint": None if ok else hint}
        )

    linux = platform.system() == "Linux" and platform.machine() == "x86_64"
    check(
        "platform", linux, f"{platform.system()} {platform.machine()}", "use a remote server: LLM4AGENTS_URL"
    )
    wanted = TOOLS if os.geteuid() == 0 else TOOLS | UNPRIVILEGED
    tools = {name: _version(name) for name in wanted}
    missing = sorted({wanted[name] for name, version in tools.items() if version is None})
    for name, version in tools.items():
        check(name, version is not None, version or "not installed", f"apt-get install {wanted[name]}")
    for name in (binaries.AGENT, binaries.SHIM):
        try:
            check(name, True, str(binaries.path(name)))
        except LLM4AgentsError as error:
            check(name, False, error.message, error.hint)
    vmms, can, why = await _vmms(settings)
    check("vmm", can is not None, _named(can) if can else str(why), "llm4agents setup")
    accelerator = can.accelerator if can else None
    check(
        "kvm",
        accelerator == "kvm",
        "in use" if accelerator == "kvm" else str(can.why_not_kvm if can else "not probed: no VMM"),
        "sandboxes run in software emulation without it",
        required=settings.require_kvm,
    )
    for vmm in vmms:
        if "ordinary" not in vmm["chosen_for"]:
            detail = vmm["detail"] if vmm["usable"] else f"not usable here: {vmm['detail']}"
            check(f"vmm {vmm['name']}", vmm["usable"], detail, vmm["hint"], required=False)
    nested = next((vmm for vmm in vmms if "nested" in vmm["chosen_for"]), None)
    refused = settings.nested == "refuse"
    check(
        "nested sandboxes",
        nested is not None or refused,
        "refused by this server's operator (LLM4AGENTS_NESTED=refuse)"
        if refused
        else f"on {LABELS[nested['name']]}"
        if nested is not None
        else "; ".join(f"{LABELS[vmm['name']]}: {vmm['why_not_nested']}" for vmm in vmms),
        "only `nested=True` needs it",
        required=False,
    )
    groups = without_cgroups(cgroups.foreseen(settings.cgroup))
    if can is not None:
        lacking = [*cell.missing(can.jail), *groups]
        check("jail", not lacking, _jail(lacking, can), hardening.GUIDE, required=False)
    else:  # without a VMM nothing can be tried
        lacks = [*hardening.jail_here(), *groups]
        detail = "; ".join(lacks) or "all that a VMM is promised can be given"
        check("jail", not lacks, detail, hardening.GUIDE, required=False)
    for name, ok, detail, hint in await network.checks(settings):
        check(name, ok, detail, hint, required=False)
    weak = hardening.here(kvm=accelerator == "kvm")
    detail = "; ".join(weak) or "nothing seen that weakens it"
    check("host for hostile code", not weak, detail, hardening.GUIDE, required=False)
    host = hosts.host(_existing(settings.state))
    memory_mib = host.memory_available_bytes >> 20
    check(
        "memory",
        memory_mib >= NEEDED_MIB,
        f"{memory_mib} MiB available",
        f"{NEEDED_MIB} MiB are needed for one",
    )
    free = shutil.disk_usage(_existing(settings.cache)).free
    templates = _templates(settings)
    needed = limits.DISK_FREE_BYTES_MIN if templates else DISK_BYTES_NEEDED
    check("disk", free >= needed, f"{free >> 20} MiB free", f"{needed >> 20} MiB are needed")
    return {
        "ok": all(entry["ok"] for entry in checks if entry["required"]),
        "vmm": can.vmm if can else None,
        "vmms": vmms,
        "accelerator": accelerator,
        "why_not_kvm": can.why_not_kvm if can else why,
        "slowdown_note": SLOWDOWN if accelerator == "tcg" else None,
        "checks": checks,
        "packages_missing": missing,
        "tools": tools,
        "templates": templates,
        "disk_free_bytes": free,
        "memory_available_bytes": host.memory_available_bytes,
        "cores": os.cpu_count(),
        "state": str(settings.state),
        "cache": str(settings.cache),
        "run": str(settings.run_dir),
    }


async def _vmms(settings: Settings) -> tuple[list[dict[str, Any]], Capabilities | None, str | None]:
    """Every driver as looked at, what the one of an ordinary create can do, and why there is none."""
    drivers = Drivers(settings)
    try:
        found = await drivers.survey()
        try:
            picked = await drivers.pick()
            can, why = await drivers.can(picked.name), None
        except LLM4AgentsError as error:
            can, why = None, error.message
        return [_vmm(one, found, settings) for one in found], can, why
    finally:
        await drivers.close()


def _vmm(one: Found, found: list[Found], settings: Settings) -> dict[str, Any]:
    """One driver, as the report has it. Pure."""
    chosen = []
    for kind, nested in (("ordinary", False), ("nested", True)):
        best = choose(found, nested)
        name = settings.vmm or (best.name if best is not None else None)
        if name == one.name and one.why_not(nested) is None:
            chosen.append(kind)
    return {
        "name": one.name,
        "usable": one.can is not None,
        "version": one.can.version if one.can else None,
        "accelerator": one.can.accelerator if one.can else None,
        "why_not_kvm": one.can.why_not_kvm if one.can else None,
        "nested": one.can.nested if one.can else False,
        "why_not_nested": one.why_not(True),
        "detail": _named(one.can) if one.can else one.why_not(False),
        "hint": one.problem.hint if one.problem else None,
        "chosen_for": chosen,
    }


def without_cgroups(parent: cgroups.Parent) -> list[str]:
    """What a VMM lacks where that is the parent of its cgroup, in words. Pure."""
    if parent.missing is None:
        return []
    return [f"{'a whole cgroup' if parent.path is not None else 'cgroups'} ({parent.missing})"]


def _jail(lacking: list[str], can: Capabilities) -> str:
    """What is around a VMM here, as a trial found it. Pure."""
    if lacking:
        return f"VMMs run without {'; without '.join(lacking)}"
    spaces = can.jail.get("ns", "of its own jailer").replace("+", ", ")
    return f"namespaces {spaces}; root, filter of system calls, cgroup"


def _named(can: Capabilities) -> str:
    how = "KVM proven" if can.accelerator == "kvm" else "software emulation"
    return f"{LABELS.get(can.vmm, can.vmm)} {can.version}, {how}"


def _version(name: str) -> str | None:
    """First line of what a tool says of its version; None when it is not installed."""
    path = shutil.which(name, path=PATH)
    if path is None:
        return None
    if name in UNPRIVILEGED:
        return path  # they have no version to tell
    flag = "-V" if name in ("mke2fs", "mkfs.erofs") else "--version"
    try:
        run = subprocess.run(
            [path, flag], capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return path
    lines = (run.stdout or run.stderr).strip().splitlines()
    return lines[0].strip() if lines else path


def _templates(settings: Settings) -> list[dict[str, Any]]:
    cache = Cache(settings.cache)
    found = []
    for path in sorted(cache.templates.glob("*/keys/*")):
        try:
            variant = parts.load(path, cache.blob)
        except LLM4AgentsError:
            continue
        found.append({"name": variant.name, "vcpus": variant.vcpus, "memory_mib": variant.memory_mib})
    return found


def _existing(path: Path) -> Path:
    """The nearest directory that exists: disk figures can be asked before anything was made."""
    while not path.exists():
        path = path.parent
    return path
