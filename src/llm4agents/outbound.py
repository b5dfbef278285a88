"""Connections this process makes to hosts that others have named: only to addresses that were looked at.

A name is resolved once, here; all of its addresses are judged, and one of those very addresses is connected to, so
that no second answer of a resolver comes in between. Not here: which addresses are refused (`images.oci`,
`engine.webhooks`), what guests connect to (the barrier).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from typing import Any

import httpcore

Judge = Callable[[str, int, str], None]
"""Given the host, the port and one of its addresses (without a scope); raises what the caller is to see instead."""


class Checked(httpcore.AsyncNetworkBackend):
    """A backend for pools of httpcore. Raises httpcore.ConnectError where nobody answers, and what `judge` raises."""

    def __init__(self, judge: Judge) -> None:
        self._real, self._judge = httpcore.AnyIOBackend(), judge

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """`timeout`: seconds for each address; one that does not answer is followed by the next."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise httpcore.ConnectError(f"{host} cannot be resolved: {error.strerror or error}") from error
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        # All of them first: who answers with an address of ours among others means no good.
        for address in addresses:
            self._judge(host, port, address.partition("%")[0])
        problem = httpcore.ConnectError(f"{host} has no address")
        for address in addresses:
            try:
                return await self._real.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                problem = httpcore.ConnectError(f"{host} port {port}: {error or 'no answer'}")
        raise problem
