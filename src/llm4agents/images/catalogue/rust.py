"""`rust`: rustc and cargo."""

from __future__ import annotations

from types import MappingProxyType

from llm4agents.images.catalogue import base
from llm4agents.images.kinds import TemplateSpec, WarmStep, WarmUp

_WARM = """\
cd $(mktemp -d)
cargo init --quiet --vcs none --name warm .
cargo build --quiet --offline
./target/debug/warm
cd /
rm -r $OLDPWD
"""

RUST = TemplateSpec(
    name="rust",
    description="base with rustc, cargo and a C linker",
    languages=("rust", "c"),
    packages=(*base.PACKAGES, "gcc", "libc6-dev", "pkg-config"),
    # Of Debian 12 that which it keeps up to date for its browsers: the other is of 2022.
    release_packages={"bookworm": ("rustc-web", "cargo-web"), "trixie": ("rustc", "cargo")},
    environment=MappingProxyType(
        {
            **base.ENVIRONMENT,
            "PATH": f"{base.HOME}/.cargo/bin:{base.ENVIRONMENT['PATH']}",
            "CARGO_HOME": f"{base.HOME}/.cargo",
            "CARGO_TERM_COLOR": "never",
            "CARGO_TERM_PROGRESS_WHEN": "never",
        }
    ),
    warm_up=WarmUp(steps=(*base.STEPS, WarmStep(("/bin/bash", "-ec", _WARM), timeout_s=300.0))),
    build_bytes=4_000_000_000,
    rootfs_bytes=900_000_000,
)
