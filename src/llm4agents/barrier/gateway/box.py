"""What the gateway has of one sandbox: its planted sockets, its policy of the moment, its names, its open flows.

Keeps nothing of a sandbox that has ended: a planted socket left open would keep its namespace alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from llm4agents import limits
from llm4agents.barrier import sockets, wire
from llm4agents.barrier.dial import Dialler
from llm4agents.barrier.gateway import packets
from llm4agents.barrier.gateway.audit import Audit
from llm4agents.barrier.gateway.flows import Flow
from llm4agents.barrier.gateway.meter import Meter
from llm4agents.barrier.gateway.names import Names, is_synthetic
from llm4agents.barrier.gateway.resolver import Resolver
from llm4agents.barrier.gateway.splice import Backlog
from llm4agents.barrier.policy import Policy, Target, Verdict
from llm4agents.barrier.rules import Protocol

_ACCEPTS = 32
_PACKETS = 64
_PAUSE_S = 0.05


def used_file(names_file: Path) -> Path:
    """Beside the names, and going when they go."""
    return names_file.with_name(f"{names_file.name}.used")


def _read_used(path: Path) -> dict[str, int]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return {str(rule): used for rule, used in found.items() if isinstance(used, int)}
    return {}


class Host:
    """What boxes need of the gateway around them."""

    dialler: Dialler
    flows_max: int
    """Of all sandboxes together: descriptors are."""
    flows: int

    def next_flow(self) -> str:
        raise NotImplementedError

    async def hand_over(self, flow: Flow) -> str | None:
        raise NotImplementedError

    def trouble(self, sandbox: str, error: BaseException) -> None:
        raise NotImplementedError

    def gone(self, box: Box) -> None:
        raise NotImplementedError


class Box:
    """Owns the descriptors it is made with, from the first line of `__init__` on."""

    def __init__(
        self,
        host: Host,
        ident: str,
        fds: Sequence[int],
        policy: Policy,
        audit: Audit,
        names_file: Path,
        parent: Path | None,
    ) -> None:
        opened: list[socket.socket] = []
        try:
            for fd in fds[:3]:
                opened.append(socket.socket(fileno=fd))
            names = Names(names_file, parent)
        except BaseException:
            for sock in opened:
                sock.detach()
            wire.close(fds)
            raise
        self._tcp, self._udp, self._packets = opened
        self._pidfd = fds[3]
        self._open = True
        self.id, self.policy, self.audit = ident, policy, audit
        self.generation = 0
        self.flows: dict[str, Flow] = {}
        self.dialler = host.dialler
        self.backlog = Backlog()
        self.connections = self.refused = self.packets = 0
        self._host = host
        self._used_file = used_file(names_file)
        self._used = _read_used(self._used_file)
        self._meters: dict[str, Meter] = {}
        self._loop = asyncio.get_running_loop()
        self.names = names
        self.resolver = Resolver(self.names, audit, lambda name: self.policy.resolve(name))
        for sock, read in (
            (self._tcp, self._accept),
            (self._udp, self._datagrams),
            (self._packets, self._logged),
        ):
            sock.setblocking(False)
            self._loop.add_reader(sock.fileno(), read)
        self._loop.add_reader(self._pidfd, host.gone, self)

    # -- what comes in ------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                client, _ = self._tcp.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._pause(self._tcp, self._accept)  # no descriptors left: others are ending
                return
            self.connections += 1
            client.setblocking(False)
            try:
                address, port = sockets.original_destination(client)
            except OSError as error:
                self._refuse(client, None, None, f"where to is not known ({error.strerror})")
                continue
            crowded = self._host.flows * 2 >= self._host.flows_max
            most = limits.FLOWS_PER_SANDBOX_CROWDED if crowded else limits.FLOWS_PER_SANDBOX_MAX
            if len(self.flows) >= most:
                self._refuse(client, address, port, f"{most} connections are open already")
            elif self._host.flows >= self._host.flows_max:
                self._refuse(client, address, port, "the gateway has no room for another connection")
            else:
                self._begin(client, address, port)

    def _begin(self, client: socket.socket, address: str, port: int) -> None:
        flow = Flow(self, client, self._host.next_flow(), address, port)
        self.flows[flow.id] = flow
        self._host.flows += 1
        flow.task = self._loop.create_task(flow.run())

    def _refuse(self, client: socket.socket, address: str | None, port: int | None, reason: str) -> None:
        self.refused += 1
        sockets.reset(client)
        self.audit.write(
            {
                "kind": "connection",
                "verdict": "deny",
                "rule": "gateway",
                "reason": reason,
                "name": self.names.name(address) if address else None,
                "address": address,
                "port": port,
                "protocol": "tcp",
            }
        )

    def _datagrams(self) -> None:
        self.resolver.datagrams(self._udp)

    def _logged(self) -> None:
        for _ in range(_PACKETS):
            try:
                datagram = self._packets.recv(65_536)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # ENOBUFS: the kernel had more to tell than there was room for
                self.audit.write(
                    {"kind": "packet", "verdict": "deny", "rule": "link", "reason": "more than could be told"}
                )
                continue
            if not datagram:
                self._loop.remove_reader(self._packets.fileno())
                return
            for record in packets.records(datagram):
                self.packets += 1
                self.audit.write(record)

    def _pause(self, sock: socket.socket, read: Callable[[], None]) -> None:
        self._loop.remove_reader(sock.fileno())

        def again() -> None:
            if self._open:
                self._loop.add_reader(sock.fileno(), read)

        self._loop.call_later(_PAUSE_S, again)

    # -- for flows ----------------------------------------------------------------------------------------

    def judge(self, asked: Target, protocol: Protocol | None = None) -> tuple[Target, Verdict]:
        """The target after rewriting, and what policy says of a connection to it."""
        target = self.policy.rewrite(asked)
        return target, self.policy.connect(target, protocol)

    def judge_address(self, target: Target, address: str) -> Verdict:
        return self.policy.address(target, address, self.dialler.own_addresses())

    @staticmethod
    def stricter(before: Verdict, now: Verdict) -> bool:
        """Whether what was let through by the one has not been looked at as the other wants it."""
        if now.via == "intercept":
            return before.via != "intercept"
        return before.raw and not now.raw

    def no_such_name(self, target: Target) -> str | None:
        """Why nothing can be at that address, whatever the policy."""
        if target.address is None:
            return None
        address = str(target.address)
        if is_synthetic(address):
            return f"{address} is the address of no name of this sandbox: resolve the name again"
        if address in (limits.GATEWAY_ADDRESS, limits.GUEST_ADDRESS):
            return f"{address} is the sandbox's own gateway, which serves DNS only"
        return None

    def meter(self, verdict: Verdict) -> Meter | None:
        """The rule's, if it has bounds: one for all flows it allows."""
        if verdict.rate_bytes_per_s is None and verdict.bytes_max is None:
            return None
        meter = self._meters.get(verdict.rule)
        if meter is None or (meter.rate, meter.most) != (verdict.rate_bytes_per_s, verdict.bytes_max):
            used = self._used.get(verdict.rule, 0) if meter is None else meter.used
            meter = self._meters[verdict.rule] = Meter(verdict.rate_bytes_per_s, verdict.bytes_max, used)
        return meter

    def spent(self, verdict: Verdict) -> bool:
        meter = self.meter(verdict)
        return meter is not None and meter.spent

    def hand_over(self, flow: Flow) -> Awaitable[str | None]:
        return self._host.hand_over(flow)

    def trouble(self, error: BaseException) -> None:
        self._host.trouble(self.id, error)

    def forget_flow(self, flow: Flow) -> None:
        if self.flows.pop(flow.id, None) is not None:
            self._host.flows -= 1

    # -- for the gateway ----------------------------------------------------------------------------------

    def obey(self, policy: Policy) -> int:
        """A new policy from now on; every open flow is judged again. How many were cut."""
        self.policy = policy
        self.generation += 1
        cut = 0
        for flow in list(self.flows.values()):
            if flow.state in ("denied", "handed", "over") or flow.asked.port == 53:
                continue  # (what was handed over, the interceptor judges again)
            if self.no_such_name(flow.asked) is not None:
                continue
            spoken = flow.first.protocol if flow.first is not None else None
            target, verdict = self.judge(flow.asked, "tcp" if spoken == "nothing" else spoken)
            reason = None
            if not verdict.allowed:
                reason = verdict.reason
            elif flow.address is not None and not self.judge_address(target, flow.address).allowed:
                reason = f"{flow.address} is no longer allowed"
            elif flow.state != "opening" and target != flow.target:
                reason = "it would go elsewhere now"
            elif (
                flow.state == "spliced" and flow.verdict is not None and self.stricter(flow.verdict, verdict)
            ):
                reason = "what is said on it is looked at now"
            if reason is not None:
                flow.cut(verdict.rule, f"cut by a new policy: {reason}")
                cut += 1
        return cut

    def save_used(self) -> None:
        """What rules with a bound on bytes have let through, for a gateway or a join to come."""
        used = {rule: meter.used for rule, meter in self._meters.items() if meter.most is not None}
        if used and {**self._used, **used} != self._used:
            self._used |= used
            with contextlib.suppress(OSError):  # (it is written again soon)
                part = self._used_file.with_name(f".{self._used_file.name}")
                part.write_text(json.dumps(self._used))
                part.replace(self._used_file)

    def sweep(self, now: float) -> None:
        """End what has been silent for too long."""
        self.save_used()
        for flow in list(self.flows.values()):
            relay = flow.relay
            if relay is not None and not relay.over:
                bound = limits.HALF_CLOSED_IDLE_S if relay.half_closed else limits.FLOW_IDLE_S
                if relay.idle_for(now) > bound:
                    relay.cut(f"silent for {bound:.0f} s")

    def describe(self) -> list[dict[str, Any]]:
        return [
            {
                "flow": flow.id,
                "state": flow.state,
                "name": flow.asked.name,
                "address": flow.address or (str(flow.asked.address) if flow.asked.address else None),
                "port": flow.asked.port,
                "protocol": flow.protocol,
                "rule": None if flow.verdict is None else flow.verdict.rule,
                "bytes_in": None if flow.relay is None else flow.relay.bytes_in,
                "bytes_out": None if flow.relay is None else flow.relay.bytes_out,
            }
            for flow in self.flows.values()
        ]

    def close(self, reason: str) -> None:
        """Everything of it, now. Idempotent."""
        if not self._open:
            return
        self._open = False
        for sock in (self._tcp, self._udp, self._packets):
            self._loop.remove_reader(sock.fileno())
        self._loop.remove_reader(self._pidfd)
        for flow in list(self.flows.values()):
            # Nobody forbade what was under way: it ends with its sandbox.
            flow.end("deny" if flow.state == "opening" else "allow", reason=reason)
        self._close_descriptors()
        self.save_used()
        self.names.close()
        self.audit.close()

    def _close_descriptors(self) -> None:
        for sock in (self._tcp, self._udp, self._packets):
            sock.close()
        os.close(self._pidfd)
