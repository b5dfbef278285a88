"""What of the host's own surroundings callers may name who are not its operator: nothing, unless he lists it.

Rules of a network and webhooks name addresses that the host dials, from where it stands: its loopback, its private
networks, its cloud's metadata service. To its own user (the unix socket, a key with scope `node`) they are his already;
to whoever has another key they are not. Not here: the floor, which is over everybody's (`barrier.judging`), what a name
resolves to (`barrier.policy`, `webhooks`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from ipaddress import ip_network
from typing import Any

from llm4agents.barrier import addresses
from llm4agents.barrier.addresses import Address
from llm4agents.barrier.judging import a_kind
from llm4agents.barrier.network import Network
from llm4agents.errors import ForbiddenError

HINT = "the server's operator lists it: LLM4AGENTS_NETWORK_PRIVATE"


class Reach:
    """Of one server. `listed`: the setting's addresses and networks; `own`: the host's addresses now."""

    def __init__(self, listed: Sequence[str], own: Callable[[], Collection[Address]]) -> None:
        self._listed, self._own = tuple(map(ip_network, listed)), own

    def check(self, network: Any) -> None:
        """A `network=` of such a caller's. Raises ForbiddenError (names the rule), InvalidRequestError."""
        own = self._own()
        for rule in Network.from_json(network).rules:
            net = rule.host.net if rule.allow else None
            kind = None if net is None else addresses.beyond(net, own)
            if net is not None and kind is not None and not addresses.within(net, self._listed):
                raise ForbiddenError(
                    f"network: `{rule}` names {a_kind(kind)} address, which a key of a project does not open",
                    hint=HINT,
                    needs=["node"],
                )

    def refused(self, address: Address) -> str | None:
        """Why a webhook of such a caller's does not go to an address; None: it does."""
        kind = addresses.classify(address, self._own())
        if kind is addresses.Kind.PUBLIC:
            return None
        inner = ip_network(addresses.reached(address))
        if kind not in addresses.NEVER and addresses.within(inner, self._listed):
            return None
        return f"{address} is {a_kind(kind)} address, which webhooks of a project do not go to"
