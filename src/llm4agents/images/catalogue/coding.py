"""`coding`: what a coding agent works with: build tools, search, and several languages."""

from __future__ import annotations

from types import MappingProxyType

from llm4agents.images.catalogue import base
from llm4agents.images.catalogue.node import NODE, NODE_ENVIRONMENT, NODE_LAUNCHERS
from llm4agents.images.kinds import File, TemplateSpec, WarmStep, WarmUp

_WARM = """\
cd $(mktemp -d)
git init -q .
echo 'int main(void) { return 0; }' > warm.c
printf 'warm: warm.c\\n\\tcc -o warm warm.c\\n' > Makefile
make -s
./warm
rg -q main .
fd -q warm
jq -n 1
sqlite3 :memory: 'select 1'
python3 -c 'import json, sqlite3, ssl'
node -e 0
cd /
rm -rf $OLDPWD
"""

CODING = TemplateSpec(
    name="coding",
    description="base with C and C++, Python, Node.js, make, ripgrep, fd, jq, tmux and SQLite",
    languages=("python", "javascript", "c", "c++", "perl", "sql"),
    packages=(
        *base.PACKAGES,
        "bzip2",
        "build-essential",
        "cmake",
        "fd-find",
        "gdb",
        "jq",
        "openssh-client",
        "patch",
        "pkg-config",
        "python-is-python3",
        "python3",
        "python3-dev",
        "python3-pip",
        "python3-venv",
        "ripgrep",
        "rsync",
        "sqlite3",
        "tmux",
        "tree",
        "wget",
    ),
    vcpus=1,
    memory_mib=2_048,
    wheels=NODE.wheels,
    moves=NODE.moves,
    drop=NODE.drop,
    files=(*NODE_LAUNCHERS, File("/usr/local/bin/fd", '#!/bin/sh\nexec fdfind "$@"\n', 0o755)),
    environment=MappingProxyType(
        {
            **base.ENVIRONMENT,
            **NODE_ENVIRONMENT,
            "PYTHONUNBUFFERED": "1",
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "GIT_TERMINAL_PROMPT": "0",
        }
    ),
    warm_up=WarmUp(steps=(*base.STEPS, WarmStep(("/bin/bash", "-ec", _WARM), timeout_s=300.0))),
    build_bytes=6_000_000_000,
    rootfs_bytes=1_300_000_000,
)
