"""What a caller wants of a new sandbox, and the row that is written down for it.

Not here: whether it may be had, and making it (`engine`, `creation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llm4agents import limits
from llm4agents.engine import attached, clock, tops
from llm4agents.engine.attached import Mount
from llm4agents.engine.bounds import Bounds
from llm4agents.engine.network import Asked
from llm4agents.engine.parts import Variant
from llm4agents.engine.principal import DEFAULT
from llm4agents.engine.traffic import Traffic
from llm4agents.store import SandboxRow


@dataclass(frozen=True, slots=True)
class Wish:
    """What a caller wants of a new sandbox. Seconds; MiB."""

    template: str = limits.DEFAULT_TEMPLATE
    idle_timeout_s: float = limits.IDLE_TIMEOUT_S
    life_s: float = limits.LIFE_S_MAX
    vcpus: int = limits.DEFAULT_VCPUS
    memory_mib: int = limits.DEFAULT_MEMORY_MIB
    env: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    require_kvm: bool = False
    vmm: str | None = None
    """The VMM it is to run on; None: the server's choice."""
    nested: bool = False
    """Whether it gets a `/dev/kvm` that works."""
    bounds: Bounds = field(default_factory=Bounds)
    wait_s: float = 0.0
    """How long to queue for room on a node that is full."""
    on_timeout: str = "kill"
    auto_resume: bool = True
    keep_s: float = limits.KEEP_S
    network: Any = None
    """As in docs/howto/network.md; None: the server's default."""
    protect: tuple[str, ...] = ()
    """Paths of the template to have read-only, as `protecting.wanted` gives them."""
    public: bool = False
    """Whether anybody may reach its ports."""
    project: str = DEFAULT
    """Whose it is; `template` is then a ref (`engine.names`)."""
    volumes: tuple[Mount, ...] = ()
    """As `attached.wanted` gives them."""

    def row(self, ident: str, asked: Asked, variant: Variant, accelerator: str) -> SandboxRow:
        """The row of the sandbox that is to be, in state `creating`."""
        now = clock.wall_s()
        return SandboxRow(
            id=ident,
            template=self.template,
            template_key=variant.key,
            state="creating",
            created_at=now,
            life_ends_at=now + self.life_s,
            idle_timeout_s=self.idle_timeout_s,
            vcpus=self.vcpus,
            memory_mib=self.memory_mib,
            disk_gib=limits.DISK_GIB,
            metadata=dict(self.metadata),
            accelerator=accelerator,
            limits=self.bounds.to_json(),
            life_s=self.life_s,
            on_timeout=self.on_timeout,
            auto_resume=self.auto_resume,
            keep_s=self.keep_s,
            network=asked.network,
            protect=list(self.protect) or None,
            disk=tops.of(variant.disk_format).chain(),
            vmm=variant.vmm,
            nested=variant.nested,
            defaults=variant.defaults,
            project=self.project,
            volumes=attached.stored(attached.left(variant.left_slots)),
            traffic=Traffic(public=self.public).stored(),
        )
