"""All sandboxes of this gateway, and what the server can ask of it. Started by `__main__`.

Answers to the server in the shapes of docs/design/barrier.md, *Gateway*; what a sandbox's connections go through is in
`box` and `flows`.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import time
import weakref
from pathlib import Path
from typing import Any

from llm4agents import limits
from llm4agents.barrier import wire
from llm4agents.barrier.dial import Dialler
from llm4agents.barrier.gateway.audit import Audit
from llm4agents.barrier.gateway.box import Box, Host, used_file
from llm4agents.barrier.gateway.flows import Flow
from llm4agents.barrier.gateway.interceptor import Interceptor
from llm4agents.barrier.policy import Policy
from llm4agents.barrier.worker_side import Op, Refused, say
from llm4agents.errors import InvalidRequestError

_SWEEP_S = 5.0
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_INTERCEPTOR_KINDS = {"request", "connection", "gateway"}
_INTERCEPTOR_KEYS = {
    "kind", "verdict", "rule", "reason", "name", "address", "port", "protocol", "method", "path", "status", "bytes_in",
    "bytes_out", "duration_ms", "flow", "credentials", "unjudged", "rewritten", "repeated",
}  # fmt: skip


class Gateway(Host):
    """Belongs to one event loop. `directory` holds `names/` and `audit/`."""

    def __init__(self, directory: Path, dialler: Dialler) -> None:
        self._names, self._audits = directory / "names", directory / "audit"
        for path in (self._names, self._audits):
            path.mkdir(mode=0o700, exist_ok=True)
        self.dialler = dialler
        self.flows = 0
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.flows_max = max(64, min(limits.FLOWS_MAX, (files - 1_024) // 3))
        self._boxes: dict[str, Box] = {}
        self._policies: weakref.WeakValueDictionary[str, Policy] = weakref.WeakValueDictionary()
        self._interceptor = Interceptor(self._said, self._interceptor_lost)
        self._handed: dict[str, Flow] = {}
        self._flow_prefix, self._flow_count = f"{time.time_ns() // 1_000_000:x}", 0
        self._troubles = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self._sweep()

    @property
    def ops(self) -> dict[str, Op]:
        return {
            "join": self.join, "policy": self.policy, "leave": self.leave, "interceptor": self.interceptor,
            "stats": self.stats, "flows": self.list_flows,
        }  # fmt: skip

    @property
    def sandboxes(self) -> list[str]:
        return list(self._boxes)

    # -- what the server asks -----------------------------------------------------------------------------

    async def join(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """`{sandbox, policy, names_from}` and tcp, udp, packets, pidfd."""
        try:
            ident, policy = _ident(message), self._policy(message)
            parent = message.get("names_from")
            if len(fds) != 4:
                raise Refused(f"join wants tcp, udp, packets and pidfd, and got {len(fds)} descriptors")
            if parent is not None and not (isinstance(parent, str) and _ID.fullmatch(parent)):
                raise Refused("names_from is no sandbox's id")
        except BaseException:
            wire.close(fds)
            raise
        before = self._boxes.pop(ident, None)
        if before is not None:
            before.close("the sandbox was joined anew")
        audit = before.audit if before is not None else Audit(self._audits, ident)
        box = Box(
            self, ident, fds, policy, audit, self._names / ident, self._names / parent if parent else None
        )
        self._boxes[ident] = box
        audit.write({"kind": "policy", "verdict": "allow", "rule": _profile(policy), "reason": "joined"})
        return {"names": len(box.names)}

    async def policy(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """`{sandbox, policy}` → `{flows, cut}`: obeyed when this is answered."""
        wire.close(fds)
        box = self._box(message)
        policy = self._policy(message)
        flows = len(box.flows)
        cut = box.obey(policy)
        box.audit.write(
            {
                "kind": "policy",
                "verdict": "allow",
                "rule": _profile(policy),
                "reason": "changed",
                "cut": cut,
                "flows": flows,
            }
        )
        return {"flows": flows, "cut": cut}

    async def leave(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """`{sandbox, forget}`: its flows end; `forget`: its names too. One that is not here has left."""
        wire.close(fds)
        ident = _ident(message)
        box = self._boxes.pop(ident, None)
        if box is not None:
            box.close("the sandbox paused or ended")
        if message.get("forget"):
            for path in (self._names / ident, used_file(self._names / ident)):
                path.unlink(missing_ok=True)
        return {}

    async def interceptor(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        if len(fds) != 1:
            wire.close(fds)
            raise Refused("interceptor wants one descriptor")
        self._interceptor.use(fds[0])
        return {}

    async def stats(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        wire.close(fds)
        boxes = self._boxes.values()
        return {
            "sandboxes": len(boxes),
            "flows": self.flows,
            "interceptor": self._interceptor.up,
            "rss_bytes": _rss_bytes(),
            "totals": {
                "connections": sum(box.connections for box in boxes),
                "refused": sum(box.refused for box in boxes),
                "queries": sum(box.resolver.queries for box in boxes),
                "packets": sum(box.packets for box in boxes),
                "troubles": self._troubles,
            },
        }

    async def list_flows(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """The sandbox's, as many as fit a message."""
        wire.close(fds)
        found = self._box(message).describe()
        return {"flows": found[:256], "count": len(found)}

    def _box(self, message: dict[str, Any]) -> Box:
        ident = _ident(message)
        box = self._boxes.get(ident)
        if box is None:
            raise Refused(f"no sandbox {ident} has joined")
        return box

    def _policy(self, message: dict[str, Any]) -> Policy:
        """Policies that are the same are one object: most sandboxes have one of few."""
        value = message.get("policy")
        key = json.dumps(value, sort_keys=True)
        policy = self._policies.get(key)
        if policy is None:
            try:
                policy = Policy.from_json(value)  # type: ignore[arg-type]
            except InvalidRequestError as error:
                raise Refused(f"policy: {error}") from None
            self._policies[key] = policy
        return policy

    # -- what boxes ask (Host) ----------------------------------------------------------------------------

    def next_flow(self) -> str:
        self._flow_count += 1
        return f"{self._flow_prefix}.{self._flow_count:x}"

    async def hand_over(self, flow: Flow) -> str | None:
        self._handed[flow.id] = flow  # before it is told: its end may come at once
        problem = await self._interceptor.hand(flow)
        if problem is not None:
            self._handed.pop(flow.id, None)
        return problem

    def trouble(self, sandbox: str, error: BaseException) -> None:
        self._troubles += 1
        if self._troubles <= 100:
            where = error.__traceback__
            while where is not None and where.tb_next is not None:
                where = where.tb_next
            place = (
                "" if where is None else f"{Path(where.tb_frame.f_code.co_filename).name}:{where.tb_lineno}"
            )
            say("failed", sandbox=sandbox, error=f"{type(error).__name__}: {error}", where=place)

    def gone(self, box: Box) -> None:
        """Its machine has ended: nothing of it stays here, whether or not the server says `leave`."""
        if self._boxes.get(box.id) is box:
            del self._boxes[box.id]
        box.close("the sandbox paused or ended")

    # -- the interceptor ----------------------------------------------------------------------------------

    def _said(self, message: dict[str, Any]) -> None:
        if message.get("event") == "audit" and isinstance(record := message.get("record"), dict):
            box = self._boxes.get(str(record.get("sandbox")))
            if box is not None and record.get("kind") in _INTERCEPTOR_KINDS:
                box.audit.write({key: value for key, value in record.items() if key in _INTERCEPTOR_KEYS})
        elif message.get("event") == "ended":
            flow = self._handed.pop(str(message.get("flow")), None)
            if flow is not None:
                flow.handed_ended(message)

    def _interceptor_lost(self) -> None:
        handed, self._handed = self._handed, {}
        for flow in handed.values():
            flow.end("allow", reason="the interceptor ended")

    # -- time ---------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        for box in list(self._boxes.values()):
            box.sweep(loop.time())
        self._sweeper = loop.call_later(_SWEEP_S, self._sweep)

    def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for box in list(self._boxes.values()):
            box.close("the gateway stops")
        self._boxes.clear()
        self._interceptor.close()
        self.dialler.close()


def _ident(message: dict[str, Any]) -> str:
    ident = message.get("sandbox")
    if not isinstance(ident, str) or not _ID.fullmatch(ident):
        raise Refused("sandbox is no sandbox's id")
    return ident


def _profile(policy: Policy) -> str:
    return f"profile {policy.network.profile}"


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
