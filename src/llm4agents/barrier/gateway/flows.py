"""One TCP connection of a guest, from its acceptance to its end: judged, looked at, dialled, relayed or handed over.

Policy decides (`Box.judge`); this is the order in which it is asked, and what the guest is told. Every wait is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import TYPE_CHECKING, Any

from llm4agents import limits
from llm4agents.barrier import sockets
from llm4agents.barrier.addresses import parse as parsed
from llm4agents.barrier.dial import DialError
from llm4agents.barrier.gateway import first, words
from llm4agents.barrier.gateway.first import First
from llm4agents.barrier.gateway.splice import Relay
from llm4agents.barrier.policy import Target, Verdict

if TYPE_CHECKING:
    from llm4agents.barrier.gateway.box import Box

SERVER_SPEAKS_FIRST = frozenset({21, 22, 23, 25, 110, 119, 143, 587, 465, 3306, 5900})
"""Ports where waiting for a client's first bytes only makes a denial slow."""


class Flow:
    """`state`: opening, spliced, handed (to the interceptor), denied, over."""

    __slots__ = (
        "address", "asked", "began", "box", "client", "first", "generation", "id", "protocol", "relay", "started",
        "state", "target", "task", "told", "unjudged", "verdict",
    )  # fmt: skip

    def __init__(self, box: Box, client: socket.socket, ident: str, address: str, port: int) -> None:
        self.box, self.client, self.id = box, client, ident
        name = box.names.name(address)
        self.asked = Target(name, None if name else parsed(address), port)
        self.target = self.asked
        """What policy's rewriting made of it."""
        self.began = time.monotonic()
        self.state = "opening"
        self.first: First | None = None
        self.protocol: str | None = None
        self.verdict: Verdict | None = None
        self.generation = box.generation
        self.address: str | None = None
        self.unjudged: str | None = None
        self.started = False
        self.told = False
        """Whether the audit has it."""
        self.relay: Relay | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def what(self) -> str:
        """In words, for whom it concerns."""
        host = self.asked.name or self.asked.address
        if self.first is not None and self.first.head is not None:
            head = self.first.head
            return f"{head.method} http://{host}:{self.asked.port}{head.path}"
        return f"{host}:{self.asked.port}"

    # -- opening ------------------------------------------------------------------------------------------

    async def run(self) -> None:
        self.started = True
        try:
            await self._open()
        except OSError:
            self.end("deny" if self.state == "denied" else "allow", reason="the guest's connection broke")
        except asyncio.CancelledError:
            self.end("deny", reason="ended while it was opened")
            raise
        except Exception as error:
            self.box.trouble(error)
            self.end("deny", reason="the gateway failed")
        finally:
            if self.state == "over" and self.relay is None:
                sockets.reset(self.client)  # here and nowhere else: nobody waits for the descriptor any more

    async def _open(self) -> None:
        if self.asked.port == 53:
            await self.box.resolver.stream(self.client)
            self.end(None)
            return
        problem = self.box.no_such_name(self.asked)
        if problem is not None:
            await self._deny("gateway", problem)
            return
        verdict = self._judge()
        if not verdict.allowed:
            await self._deny(verdict.rule, verdict.reason)
            return
        if self.box.spent(verdict):
            await self._deny(verdict.rule, "the bytes this rule allows are used up")
            return
        if verdict.via != "raw" or len(verdict.protocols) < 3:
            self.first = await first.look(self.client, limits.FIRST_BYTES_S)
            self.protocol = self.first.protocol if self.first.protocol != "nothing" else None
            if self.first.ended:
                self.end("allow", reason="it ended before it said anything")
                return
            verdict = self._judge()  # now that the protocol is known, and by the policy of now
            if not verdict.allowed:
                await self._deny(verdict.rule, verdict.reason)
                return
            problem = self._contradiction(self.first, verdict)
            if problem is not None:
                await self._deny(
                    verdict.rule, problem, status=self.first.status if self.first.refused else 403
                )
                return
            if verdict.via == "intercept":
                await self._hand_over()
                return
        await self._splice(verdict)

    def _judge(self) -> Verdict:
        """By the policy of now, and by what the first bytes told; silence counts as neither HTTP nor TLS."""
        self.generation = self.box.generation
        spoken = None if self.first is None else self.first.protocol
        self.target, verdict = self.box.judge(self.asked, "tcp" if spoken == "nothing" else spoken)
        self.verdict = verdict
        return verdict

    def _contradiction(self, found: First, verdict: Verdict) -> str | None:
        """Why what the client says itself does not go with where it connects; None: it does."""
        if verdict.raw and verdict.via != "intercept":
            return None  # anything may be said there, so nothing it says can be held against it
        if found.refused is not None:
            return found.refused
        if found.protocol not in ("tls", "http"):
            return None
        port = self.asked.port
        if found.head is not None and found.head.port not in (None, port):
            return f"the Host header's port {found.head.port} is not the connection's ({port})"
        if found.name == self.target.seen_as:
            return None
        word = "TLS server name" if found.protocol == "tls" else "Host header"
        if self.asked.name is not None:
            return f"the {word} is {found.name or 'missing'}, and the connection is to {self.asked.name}"
        if found.name is None:
            return None
        # To an address, and for a name: what is denied by its name is not to be had by its address.
        named = self.box.judge(Target(found.name, None, port), found.protocol)[1]
        if not named.allowed and named.rule not in ("default", "floor: default"):
            return f"the {word} is {found.name}: {named.reason}"
        if named.allowed and named.via == "intercept" and verdict.via != "intercept":
            return f"connect to {found.name} by its name: its requests are looked at"
        return None

    async def _splice(self, verdict: Verdict) -> None:
        plain = self.first is not None and self.first.protocol == "http"
        target = self.target
        box = self.box
        try:
            there = await box.dialler.dial(
                target.name or str(target.address),
                target.port,
                judge=lambda address: box.judge_address(target, address),
                plain=plain,
                owner=box.id,
                short=box.policy.names(target),
            )
        except DialError as error:
            if error.kind == "denied":
                await self._deny(error.rule or verdict.rule, error.reason)
            else:
                await self._fail(error)
            return
        self.address, self.unjudged = there.address, there.unjudged
        if self.generation != box.generation:  # policy has changed meanwhile
            led, before = target, verdict
            verdict = self._judge()
            problem = None if verdict.allowed else verdict.reason
            if problem is None and (self.target != led or box.stricter(before, verdict)):
                problem = "the network's policy has changed meanwhile: connect again"
            if problem is not None:
                sockets.reset(there.socket)
                await self._deny(verdict.rule, problem)
                return
        sockets.no_delay(self.client)
        self.state = "spliced"
        self.relay = Relay(self.client, there.socket, self._relayed, box.meter(verdict), box.backlog)
        self.relay.start()

    def _relayed(self, reason: str | None) -> None:
        if self.state == "spliced":
            self.end("allow", reason=reason)

    async def _hand_over(self) -> None:
        problem = await self.box.hand_over(self)
        if problem is not None:
            await self._fail(DialError("intercept", problem), status=503)
            return
        self.state = "handed"
        self.client.close()  # the interceptor's now

    def handed_ended(self, message: dict[str, Any]) -> None:
        """The interceptor's word on how much went through."""
        count: dict[str, Any] = {
            key: value for key in ("bytes_in", "bytes_out") if isinstance(value := message.get(key), int)
        }
        meter = None if self.verdict is None else self.box.meter(self.verdict)
        if meter is not None:
            meter.take(sum(count.values()))
        rule, reason = (str(message[key])[:500] if key in message else None for key in ("rule", "reason"))
        self.end("allow" if rule is None else "deny", rule=rule, reason=reason, **count)

    # -- ends ---------------------------------------------------------------------------------------------

    async def _deny(self, rule: str, reason: str, *, status: int = 403) -> None:
        """Say no in the guest's own protocol; a client that says nothing hears it soon all the same."""
        self.state = "denied"
        if self.first is None and self.asked.port not in SERVER_SPEAKS_FIRST:
            self.first = await first.look(self.client, limits.DENIED_FIRST_BYTES_S)
            self.protocol = self.first.protocol if self.first.protocol != "nothing" else None
        self._write("deny", rule=rule, reason=reason)
        profile = self.box.policy.network.profile
        host = (
            self.asked.name
            or (self.first.name if self.first is not None else None)
            or str(self.asked.address)
        )
        port = "" if self.asked.port in (80, 443) else f":{self.asked.port}"
        text = words.denied(self.what, rule, reason, profile, f"{host}{port}")
        await self._tell(status, text, ours=True)

    async def _fail(self, error: DialError, status: int | None = None) -> None:
        self._write("allow", reason=error.reason)
        self.state = "denied"
        status = status or (504 if error.kind == "timeout" else 502)
        await self._tell(status, words.failed(self.what, error.reason), ours=False)

    async def _tell(self, status: int, text: str, *, ours: bool) -> None:
        protocol = None if self.first is None else self.first.protocol
        with contextlib.suppress(OSError):
            if protocol == "http":
                head_only = (
                    self.first is not None
                    and self.first.head is not None
                    and self.first.head.method == "HEAD"
                )
                await _last_words(self.client, words.http(status, text, head_only=head_only))
            elif protocol == "tls":
                await _last_words(self.client, words.tls(ours=ours))
        self.end(None)

    def cut(self, rule: str, reason: str) -> None:
        """By a new policy, or because the sandbox ends: at once, with a RST."""
        self.end("deny", rule=rule, reason=reason)

    def end(
        self, verdict: str | None, *, rule: str | None = None, reason: str | None = None, **more: Any
    ) -> None:
        """Close, write it down (unless that is done, or `verdict` is None), be forgotten. Idempotent."""
        if self.state == "over":
            return
        self.state = "over"
        if self.relay is not None:
            self.relay.cut(reason or "")
        if not self.started:
            sockets.reset(self.client)  # (what is cancelled before its first step takes none)
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        if verdict is not None and not self.told:
            self._write(verdict, rule=rule, reason=reason, **more)
        self.box.forget_flow(self)

    def _write(
        self, verdict: str, *, rule: str | None = None, reason: str | None = None, **more: Any
    ) -> None:
        self.told = True
        relay = self.relay
        target = self.target
        record: dict[str, Any] = {
            "kind": "connection",
            "verdict": verdict,
            "rule": rule or (self.verdict.rule if self.verdict is not None else None),
            "reason": reason,
            "name": self.asked.name,
            "address": self.address or _text(self.asked.address),
            "port": self.asked.port,
            "protocol": self.protocol or "tcp",
            "duration_ms": round((time.monotonic() - self.began) * 1000),
            "flow": self.id,
            "unjudged": self.unjudged,
        }
        if self.asked.name is None and self.first is not None:
            record["says"] = self.first.name  # nothing has looked whether it is that
        if target != self.asked:
            record["rewritten"] = str(target)
        if self.first is not None and self.first.head is not None:
            record.update(method=self.first.head.method, path=self.first.head.path)
        if self.first is not None and self.first.hello is not None and self.first.hello.ech:
            record["ech"] = True
        if relay is not None:
            record.update(bytes_in=relay.bytes_in, bytes_out=relay.bytes_out)
        self.box.audit.write({**record, **more})


def _text(value: object) -> str | None:
    return None if value is None else str(value)


async def _last_words(sock: socket.socket, payload: bytes) -> None:
    """Send, and stay until the client has read them: a close with its bytes unread would take ours with it."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limits.LAST_WORDS_S):
            await loop.sock_sendall(sock, payload)
            sock.shutdown(socket.SHUT_WR)
            for _ in range(64):
                if not await loop.sock_recv(sock, 65_536):
                    break
