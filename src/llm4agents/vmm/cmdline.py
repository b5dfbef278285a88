"""What the guest's kernel is told by every VMM that boots it on KVM. Pure. (QEMU's list is its own, in its `command`:
it grew in emulation, and templates depend on it.)"""

from __future__ import annotations

from typing import Final

COMMON: Final = (
    "console=ttyS0",
    "loglevel=4",
    "8250.nr_uarts=1",
    "panic=-1",
    "random.trust_cpu=on",
    # What is on every system call's path, or ticks in an idle clone, for nobody. Huge pages only for who asks: a
    # clone would pay 2 MiB for each it touches.
    "lsm=landlock,yama",
    "audit=0",
    "psi=0",
    "nowatchdog",
    "transparent_hugepage=madvise",
    # Freezing file systems waits for grace periods: 30 ms of a pause's standstill if they come by the tick.
    "rcupdate.rcu_expedited=1",
)
