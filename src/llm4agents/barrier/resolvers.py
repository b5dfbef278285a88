"""The public resolvers of data/resolvers.txt, read once. No decisions: policy.py's."""

from __future__ import annotations

from functools import lru_cache
from importlib import resources

from llm4agents.barrier import addresses
from llm4agents.barrier.addresses import Address


@lru_cache(maxsize=1)
def known() -> tuple[frozenset[str], frozenset[Address]]:
    """Their names and their addresses."""
    text = resources.files("llm4agents.barrier").joinpath("data/resolvers.txt").read_text("ascii")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = {line: addresses.parse(line) for line in lines}
    names = frozenset(addresses.name(line) for line, address in found.items() if address is None)
    return names, frozenset(address for address in found.values() if address is not None)


def is_resolver(name: str) -> bool:
    """Whether the name, or a domain above it, is a known resolver's."""
    names, _ = known()
    while name:
        if name in names:
            return True
        name = name.partition(".")[2]
    return False


def is_resolver_address(address: Address) -> bool:
    return address in known()[1] or addresses.reached(address) in known()[1]
