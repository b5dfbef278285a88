"""`bun`: JavaScript and TypeScript with Bun."""

from __future__ import annotations

from types import MappingProxyType

from llm4agents.images.catalogue import base
from llm4agents.images.kinds import File, NpmPackage, TemplateSpec, WarmStep, WarmUp

BUN = TemplateSpec(
    name="bun",
    description="base with Bun: TypeScript and JavaScript, bundler, test runner and packages",
    languages=("typescript", "javascript"),
    packages=base.PACKAGES,
    npm=(
        NpmPackage(
            # For processors without AVX2 too: a guest in emulation may have none.
            name="@oven/bun-linux-x64-baseline",
            version="1.4.5",
            integrity="sha512-s8yMwYcFnnrA178gji0gZbkE2WVDej/Ti1x770oPfihxyRxSMNhGhiAQNXV53aDeraZxksdvKV/RAdQBCd0qPA==",
            licence="MIT",
            files=(("package/bin/bun", "/usr/local/bin/bun", 0o755),),
        ),
    ),
    files=(File("/usr/local/bin/bunx", '#!/bin/sh\nexec /usr/local/bin/bun x "$@"\n', 0o755),),
    environment=MappingProxyType(
        {
            **base.ENVIRONMENT,
            "PATH": f"{base.HOME}/.bun/bin:{base.ENVIRONMENT['PATH']}",
            "BUN_INSTALL": f"{base.HOME}/.bun",
            "DO_NOT_TRACK": "1",
        }
    ),
    warm_up=WarmUp(
        steps=(
            *base.STEPS,
            WarmStep(
                (
                    "/bin/bash",
                    "-ec",
                    "cd $(mktemp -d); echo 'const x: number = 1; console.log(x)' > warm.ts;"
                    " bun run warm.ts; bun --version; cd /; rm -r $OLDPWD",
                )
            ),
        )
    ),
    build_bytes=2_000_000_000,
    rootfs_bytes=400_000_000,
)
