"""Hatch build hook: a Linux x86-64 wheel carries the static agent and shim; elsewhere the wheel is pure."""

import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildBinaries(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or version == "editable":
            return
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            return
        root = Path(self.root)
        out = subprocess.run(
            [sys.executable, str(root / "scripts" / "build_bin.py")],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        directory = Path(out.stdout.strip())
        for binary in sorted(directory.iterdir()):
            build_data["force_include"][str(binary)] = f"llm4agents/_bin/{binary.name}"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-manylinux_2_17_x86_64"  # static binaries need no libc of the host
