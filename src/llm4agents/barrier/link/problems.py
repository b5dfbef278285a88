"""Why a link cannot be made here, in words that say what to do. Pure.

`build` raises these with the step that failed; the facts about the system are gathered there.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import Literal

_ROOT = "run the server as root"
_DEVICE = "a container must be given the device (`--device /dev/net/tun`)"

Step = Literal["user namespace", "network namespace", "tun", "tap", "nft", "packet log", "sockets"]


class LinkProblem(Exception):
    """A link cannot be made on this host; the message says what to do."""


@dataclass(frozen=True, slots=True)
class System:
    """What matters of the system when a step has failed."""

    root: bool
    clone_sysctl: str = ""
    """kernel.unprivileged_userns_clone (Debian and its kin), empty where there is none."""
    apparmor_sysctl: str = ""
    """kernel.apparmor_restrict_unprivileged_userns."""
    namespaces_max: str = ""
    """user.max_user_namespaces."""


def explain(step: Step, number: int, system: System, detail: str = "") -> str:
    """One or two sentences. `number` is the errno (0: none), `detail` what a tool has said."""
    why = os.strerror(number) if number else detail
    gone = number in (errno.ENOENT, errno.ENODEV, errno.ENXIO)
    match step:
        case "user namespace":
            words = f"this user may not make a user namespace ({why})"
            return f"a network needs root or a user namespace, and {words}: {_namespace(number, system)}"
        case "network namespace" if number == errno.EPERM:
            return f"a network namespace cannot be made ({why}): a container needs CAP_SYS_ADMIN and CAP_NET_ADMIN"
        case "network namespace":
            return f"a network namespace cannot be made ({why}); user.max_net_namespaces bounds how many there are"
        case "tun" if gone:
            return f"there is no /dev/net/tun: load its kernel module (`modprobe tun`); {_DEVICE}"
        case "tun" if system.root:
            return f"/dev/net/tun cannot be opened ({why}): {_DEVICE}"
        case "tun":
            return (
                f"/dev/net/tun cannot be opened by this user ({why}): as root, `chmod 0666 /dev/net/tun`"
                f' (for good: a udev rule `KERNEL=="tun", MODE="0666"`), or {_ROOT}'
            )
        case "tap":
            return f"a tap device cannot be made ({why}): that needs CAP_NET_ADMIN, and the kernel module tun"
        case "nft" if gone:
            return "`nft` is not installed: apt-get install nftables"
        case "nft":
            return (
                f"the packet filter could not be set up: {why}. It needs nf_tables of Linux 5.10 or later, with the"
                " netdev family and the modules nft_redir, nft_reject, nft_connlimit, nft_numgen, nft_limit, nft_log"
            )
        case "packet log":
            return f"the packet log could not be set up ({why}): `modprobe nfnetlink_log`"
        case "sockets":
            return f"the sockets of a link could not be made ({why})"


def _namespace(number: int, system: System) -> str:
    if system.clone_sysctl == "0":
        return f"as root, `sysctl kernel.unprivileged_userns_clone=1`, or {_ROOT}"
    if number == errno.ENOSPC or system.namespaces_max == "0":
        return f"user.max_user_namespaces is {system.namespaces_max or 'used up'}: raise it, or {_ROOT}"
    if system.apparmor_sysctl == "1":
        return f"as root, `sysctl kernel.apparmor_restrict_unprivileged_userns=0`, or {_ROOT}"
    return (
        "Linux makes none in a chroot (enter it with pivot_root, as container runtimes do), and some seccomp profiles"
        f" of containers forbid them: lift that, or {_ROOT}"
    )
