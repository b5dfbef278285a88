"""What the acts on a sandbox share, and where its things are on this host."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llm4agents.engine.live import Live
from llm4agents.store import SandboxRow, Store
from llm4agents.vmm import clearing
from llm4agents.vmm.base import Driver, Snapshot
from llm4agents.vmm.choice import Drivers

if TYPE_CHECKING:
    from llm4agents.engine.network import Networks
    from llm4agents.engine.protecting import Protecting
    from llm4agents.engine.templates import Templates
    from llm4agents.engine.volumes import Volumes

TOP = "upper.qcow2"


@dataclass(frozen=True, slots=True)
class Chain:
    """A sandbox's disk: the writable top (a name in its directory) and what it lies on, nearest first."""

    top: str = TOP
    layers: tuple[str, ...] = ()
    """Names in `layers/`; under the last of them is the template's own upper."""

    def over(self, layer: str, top: str) -> Chain:
        """This disk with its top frozen as `layer` and a new `top`."""
        return Chain(top, (layer, *self.layers))

    def to_json(self) -> dict[str, object]:
        return {"top": self.top, "layers": list(self.layers)}


def chain_of(row: SandboxRow) -> Chain:
    if row.disk is None:
        return Chain()
    return Chain(str(row.disk["top"]), tuple(str(layer) for layer in row.disk["layers"]))


def new_layer() -> str:
    return f"{secrets.token_hex(10)}.qcow2"


class Places:
    """Where a sandbox's things are on this host."""

    def __init__(self, state: Path, run_dir: Path) -> None:
        self.sandboxes = state / "sandboxes"
        self.layers = state / "layers"
        self.photographs = state / "photographs"
        """Machines being forked or made a template of: gone with the call, and swept by the next server."""
        self.machines = run_dir / "vm"

    def disk(self, sandbox: str, top: str = TOP) -> Path:
        return self.sandboxes / sandbox / top

    def layer(self, name: str) -> Path:
        return self.layers / name

    def chain(self, row: SandboxRow) -> tuple[Path, tuple[Path, ...]]:
        """Paths of the top and of the layers of a sandbox's disk."""
        chain = chain_of(row)
        return self.disk(row.id, chain.top), tuple(self.layer(name) for name in chain.layers)

    def run(self, sandbox: str) -> Path:
        return self.machines / sandbox

    def pause(self, sandbox: str) -> Path:
        """The pause; complete when it has a manifest."""
        return self.sandboxes / sandbox / "pause"

    def used(self, sandbox: str) -> Path:
        """A pause whose machine has been let run: its memory no longer fits its disk."""
        return self.sandboxes / sandbox / "pause.used"

    def remove(self, sandbox: str) -> None:
        """Everything of a sandbox whose machine has ended. Idempotent. Layers are the store's to release."""
        for path in (self.sandboxes / sandbox, self.machines / sandbox):
            clearing.remove(path)

    def remove_run(self, sandbox: str) -> None:
        clearing.remove(self.machines / sandbox)

    # -- the environment of its create, which no database and no template gets ----------------------------

    def keep_env(self, sandbox: str, env: Mapping[str, str]) -> None:
        if env:
            path = self.sandboxes / sandbox / "env.json"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "w") as file:
                json.dump(dict(env), file)

    def env(self, sandbox: str) -> dict[str, str]:
        try:
            body = json.loads((self.sandboxes / sandbox / "env.json").read_text())
        except (OSError, ValueError):
            return {}
        return {str(name): str(value) for name, value in body.items()}

    def sweep_layers(self, wanted: set[str]) -> list[str]:
        """Remove layers that no sandbox lies on; their names. Blocks little: unlinks."""
        gone = []
        for path in self.layers.iterdir() if self.layers.is_dir() else []:
            if path.name not in wanted:
                path.unlink(missing_ok=True)
                gone.append(path.name)
        return gone


@dataclass(frozen=True, slots=True)
class Node:
    """The engine's parts as the acts need them."""

    drivers: Drivers
    store: Store
    places: Places
    templates: Templates
    protecting: Protecting
    on_deadline: Callable[[Live, str], None]
    free_bytes: Callable[[], int]
    later: Callable[[Callable[[], None]], None]
    """For a write of the store that its full disk refused: done as soon as there is room."""
    networks: Networks
    volumes: Volumes

    def driver_of(self, snapshot: Snapshot) -> Driver:
        """The one that made it, and that alone can load it."""
        return self.drivers.of(snapshot.identity["driver"])

    def live(self, row: SandboxRow, machine: object, agent: object, env: Mapping[str, str]) -> Live:
        return Live(row, machine, agent, self.on_deadline, self.free_bytes, env=dict(env))  # type: ignore[arg-type]
