"""`deno`: JavaScript and TypeScript with Deno."""

from __future__ import annotations

from types import MappingProxyType

from llm4agents.images.catalogue import base
from llm4agents.images.kinds import TemplateSpec, WarmStep, WarmUp

DENO = TemplateSpec(
    name="deno",
    description="base with Deno: TypeScript and JavaScript",
    languages=("typescript", "javascript"),
    packages=base.PACKAGES,
    wheels="deno",
    drop=("deno",),  # what starts it from Python
    environment=MappingProxyType(
        {
            **base.ENVIRONMENT,
            "PATH": f"{base.HOME}/.deno/bin:{base.ENVIRONMENT['PATH']}",
            "DENO_DIR": f"{base.HOME}/.cache/deno",
            "DENO_NO_UPDATE_CHECK": "1",
            "DENO_NO_PROMPT": "1",
            # It brings its own list of certificates; the node's is in the system's.
            "DENO_TLS_CA_STORE": "system,mozilla",
        }
    ),
    warm_up=WarmUp(
        steps=(
            *base.STEPS,
            WarmStep(("/usr/local/bin/deno", "eval", "const x: number = 1; console.log(x)")),
            WarmStep(
                (
                    "/bin/bash",
                    "-ec",
                    "cd $(mktemp -d); echo 'const x: number = 1; console.log(x)' > warm.ts;"
                    " deno run warm.ts; cd /; rm -r $OLDPWD",
                )
            ),
        )
    ),
    build_bytes=2_000_000_000,
    rootfs_bytes=400_000_000,
)
