"""Which disks a machine can have: the rule of every driver. Pure. Not here: formats and layers (each driver)."""

from __future__ import annotations

from collections.abc import Sequence

from llm4agents.errors import InvalidRequestError
from llm4agents.vmm.base import Disk


def check(disks: Sequence[Disk], allowed: Sequence[str]) -> None:
    """Raises InvalidRequestError when they do not fit the slots `allowed`."""
    slots = [disk.slot for disk in disks]
    for slot in slots:
        if slot not in allowed or slots.count(slot) > 1:
            raise InvalidRequestError(
                f"disk slot {slot!r}: expected each of {', '.join(allowed)} at most once"
            )
    if not {"root", "upper"} <= set(slots):
        raise InvalidRequestError("a machine needs the disks `root` and `upper`")
    for disk in disks:
        if (disk.slot == "root") != disk.read_only:
            # Read-only is a feature the guest has negotiated: the template's slots are writable but for root.
            raise InvalidRequestError(
                f"disk {disk.slot}: `root` is read-only and every other slot is writable"
            )
