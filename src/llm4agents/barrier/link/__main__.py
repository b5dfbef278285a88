"""The link process: makes namespaces for the server, and keeps none.

A worker (`barrier.workers`, privileged: as root it needs CAP_SYS_ADMIN and CAP_NET_ADMIN). Each request is done by a
child of its own, which enters the namespace, hands its descriptors back and ends: this process never leaves its own,
and no failure leaves it somewhere in between. It reads nothing from a guest.

Requests: `make`, `packet_socket` (+ netns), `check`; docs/design/barrier.md. Standard library only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from llm4agents import limits
from llm4agents.barrier import wire
from llm4agents.barrier.link import build
from llm4agents.barrier.link.problems import LinkProblem
from llm4agents.barrier.worker_side import Answer, Refused, Side


async def make(message: dict[str, Any], fds: list[int]) -> Answer:
    wire.close(fds)
    return {}, _done(build.make)


async def packet_socket(message: dict[str, Any], fds: list[int]) -> Answer:
    try:
        if len(fds) != 1:
            raise Refused("packet_socket takes one descriptor, a network namespace")
        return {}, _done(lambda: [build.packet_socket(fds[0])])
    finally:
        wire.close(fds)


async def check(message: dict[str, Any], fds: list[int]) -> Answer:
    """Makes one, to see."""
    wire.close(fds)
    try:
        wire.close(in_child(build.make))
    except LinkProblem as problem:
        return {"problem": str(problem)}
    return {"problem": None}


def _done(work: Callable[[], list[int]]) -> list[int]:
    try:
        return in_child(work)
    except LinkProblem as problem:
        raise Refused(str(problem)) from None


def in_child(work: Callable[[], list[int]]) -> list[int]:
    """The descriptors `work` returns in a child process of its own. Raises LinkProblem with its words."""
    ours, theirs = wire.pair()
    with ours, theirs:
        pid = os.fork()
        if pid == 0:
            _child(work, theirs)
        theirs.close()
        try:
            ours.settimeout(limits.LINK_MAKE_TIMEOUT_S)
            answer, fds = wire.receive(ours)
        except wire.WireError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            answer, fds = {"error": "the making of a namespace ended without a word, or took too long"}, []
        finally:
            os.waitpid(pid, 0)
    if answer.get("ok") is not True:
        wire.close(fds)
        raise LinkProblem(str(answer.get("error")))
    return fds


def _child(work: Callable[[], list[int]], answer: socket.socket) -> NoReturn:
    status = 1
    try:
        try:
            wire.send(answer, {"ok": True}, work())
        except (LinkProblem, OSError) as problem:
            wire.send(answer, {"ok": False, "error": str(problem)})
        status = 0
    finally:
        # Not a return: what the parent would do at its end is not the child's to do.
        os._exit(status)


if __name__ == "__main__":
    asyncio.run(Side({"make": make, "packet_socket": packet_socket, "check": check}).run())
