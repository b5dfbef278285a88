"""Build the agent and the shim (static, release) into the cache, once per content of their sources.

Prints the directory. Uses only the standard library and the package's own `binaries` module.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from llm4agents import binaries  # noqa: E402
from llm4agents.config import settings  # noqa: E402


def main() -> None:
    dest = binaries.build_dir(ROOT)
    names = (binaries.AGENT, binaries.SHIM)
    if not all((dest / name).exists() for name in names):
        # Of this build alone: cargo goes by times of files, and a copied cache or an older checkout has taken it in.
        work = settings().cache / "build" / f"cargo-{dest.name}-{os.getpid()}"
        env = {
            **os.environ,
            "CARGO_TARGET_DIR": str(work),
            # Static glibc: the guest's image may hold no libc at all, the host's an older one.
            "RUSTFLAGS": "-C target-feature=+crt-static -C relocation-model=static",
        }
        target = "x86_64-unknown-linux-gnu"
        subprocess.run(
            [
                os.environ.get("CARGO", "cargo"),
                "build",
                "--release",
                "--locked",
                "--target",
                target,
                "-p",
                "llm4agents-agent",
                "-p",
                "llm4agents-shim",
            ],
            cwd=ROOT,
            env=env,
            check=True,
            stdout=sys.stderr,
        )
        staging = dest.with_name(f".{dest.name}.{os.getpid()}")
        staging.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy2(Path(env["CARGO_TARGET_DIR"]) / target / "release" / name, staging / name)
        if dest.exists():
            shutil.rmtree(dest)
        staging.rename(dest)
        shutil.rmtree(work, ignore_errors=True)
    print(dest)


if __name__ == "__main__":
    main()
