"""What a step of a recipe runs in the guest. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from llm4agents.engine import calls
from llm4agents.recipe import Run, State, Step

_PIP: Final = {"PIP_ROOT_USER_ACTION": "ignore", "PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_NO_INPUT": "1"}
_NPM: Final = {"NPM_CONFIG_PREFIX": "/usr/local", "NPM_CONFIG_UPDATE_NOTIFIER": "false"}


@dataclass(frozen=True, slots=True)
class Command:
    """`env`: what the recipe says, without what it began with."""

    run: Run
    user: str
    env: Mapping[str, str]
    cwd: str | None
    timeout_s: float


def argv(run: Run) -> list[str]:
    """A command of a recipe as the guest is given it."""
    return calls.shell(run) if isinstance(run, str) else list(run)


def command(step: Step, state: State) -> Command | None:
    """What it runs; None for what runs nothing."""
    if step.op == "run":
        return Command(step.value, step.user or state.user, state.env, state.workdir, step.timeout_s)
    if step.op == "apt":
        words = " ".join(map(shlex.quote, step.value))
        line = (
            "apt-get update -q -o Acquire::Languages=none && apt-get install -qy --no-install-recommends "
            f"{words} && apt-get clean && rm -rf /var/lib/apt/lists/*"
        )
        return Command(line, "root", {**state.env, "DEBIAN_FRONTEND": "noninteractive"}, "/", step.timeout_s)
    words = " ".join(map(shlex.quote, step.value or ()))
    # As root, and so for everybody: an interpreter that is isolated looks into no home. A relative path of a
    # requirement is meant from the working directory.
    if step.op == "pip":
        line = f"python3 -m pip install --no-cache-dir --disable-pip-version-check {words}"
        return Command(line, "root", {**state.env, **_PIP}, state.workdir or "/", step.timeout_s)
    if step.op == "npm":
        # Node looks for modules in every directory above a program, and nowhere near those that are global.
        line = (
            f"npm install -g --no-audit --no-fund --logs-max=0 {words} && "
            '{ [ -e /node_modules ] || ln -s "$(npm root -g)" /node_modules; } && '
            "npm cache clean --force >/dev/null 2>&1"
        )
        return Command(line, "root", {**state.env, **_NPM}, state.workdir or "/", step.timeout_s)
    return None
