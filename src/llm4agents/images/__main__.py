"""Development: build the parts of one template and print where they are.

python -m llm4agents.images base|python --out DIR [--agent FILE] [--refresh]

Not a user's command: `llm4agents template build` also boots, warms and freezes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from llm4agents import binaries, limits
from llm4agents.config import settings
from llm4agents.errors import LLM4AgentsError
from llm4agents.images import disk, spec
from llm4agents.images.cache import Cache
from llm4agents.images.initramfs import build_initrd
from llm4agents.images.kernel import build_kernel
from llm4agents.images.rootfs import build_rootfs


def _say(step: str, detail: str, fraction: float | None) -> None:
    done = "" if fraction is None else f"{fraction:4.0%} "
    sys.stderr.write(f"{step:7} {done}{detail}\n")


async def _main(arguments: argparse.Namespace) -> dict[str, object]:
    template = spec.get(arguments.template)
    cache = Cache(settings().cache)
    cache.sweep()
    out: Path = arguments.out
    times = {}
    async with cache.building(_say):
        began = time.monotonic()
        kernel = await build_kernel(cache, _say, refresh=arguments.refresh)
        agent = arguments.agent or binaries.path(binaries.AGENT)
        initrd = build_initrd(kernel, agent, cache)
        times["kernel_s"], began = time.monotonic() - began, time.monotonic()
        authority = arguments.authority.read_bytes() if arguments.authority else None
        rootfs = await build_rootfs(template, cache, _say, refresh=arguments.refresh, authority=authority)
        times["rootfs_s"], began = time.monotonic() - began, time.monotonic()
        links = {"vmlinux": kernel.vmlinux, "initrd": initrd.path, "rootfs.erofs": rootfs.path}
        for name, target in links.items():
            (out / name).unlink(missing_ok=True)
            (out / name).symlink_to(target)
        if not (out / "upper.raw").exists():
            await disk.make_upper(out / "upper.raw", limits.DISK_GIB << 30)
        (out / "upper.qcow2.empty").unlink(missing_ok=True)
        await disk.make_overlay(out / "upper.raw", out / "upper.qcow2.empty")
        times["disk_s"] = time.monotonic() - began
    return {
        "kernel": kernel.release,
        **{name: str(out / name) for name in (*links, "upper.raw", "upper.qcow2.empty")},
        "rootfs_bytes": rootfs.bytes,
        "packages": len(rootfs.contents),
        "seconds": {name: round(value, 1) for name, value in times.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m llm4agents.images", description=__doc__)
    parser.add_argument("template", choices=sorted(spec.BUILTIN))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--agent", type=Path, help="an agent binary other than the built one")
    parser.add_argument("--authority", type=Path, help="a CA's certificate that the guest trusts (PEM)")
    parser.add_argument("--refresh", action="store_true")
    try:
        arguments = parser.parse_args()
        arguments.out = arguments.out.absolute()
        arguments.out.mkdir(parents=True, exist_ok=True)
        sys.stdout.write(json.dumps(asyncio.run(_main(arguments)), indent=1) + "\n")
    except LLM4AgentsError as error:
        sys.stderr.write(f"error: {error}\n{error.details.get('log', '')}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
