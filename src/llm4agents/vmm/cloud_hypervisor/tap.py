"""A descriptor of a tap for a VMM that speaks vnet_hdr: the sandbox's own tap, or one that leads nowhere. For root.

A network namespace is a thread's, so each act has a thread of its own that ends with it. Blocks for some ms.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Callable

from llm4agents.errors import HostSetupError
from llm4agents.vmm.base import TAP_NAME

_DEVICE = "/dev/net/tun"
_CLONE_NEWNET = 0x4000_0000
_TUNSETIFF, _SIOCSIFFLAGS, _IFF_UP = 0x4004_54CA, 0x8914, 0x1
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000


def in_namespace(netns: int) -> int:
    """The tap TAP_NAME of the network namespace that is open as `netns`, which nobody holds now.

    The caller closes it. Raises HostSetupError.
    """
    return _elsewhere(lambda: _setns(netns), up=False)


def nowhere() -> int:
    """A tap in a namespace of its own, which is gone when the descriptor is closed: a NIC that is connected to nothing.

    The caller closes it. Raises HostSetupError.
    """
    # Up: a write to one that is down is an error, and that would end the VMM.
    return _elsewhere(_unshare, up=True)


def _elsewhere(enter: Callable[[], None], *, up: bool) -> int:
    found: list[int] = []
    failed: list[OSError] = []

    def act() -> None:
        try:
            enter()
            found.append(_open(up))
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=act, name="open a tap")
    thread.start()
    thread.join()
    if failed:
        raise HostSetupError(
            f"a tap for the sandbox's NIC cannot be had: {failed[0].strerror}",
            hint=f"Cloud Hypervisor needs {_DEVICE} and root",
        ) from failed[0]
    return found[0]


def _open(up: bool) -> int:
    fd = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", TAP_NAME.encode(), flags))
        if up:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as control:
                fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH22x", TAP_NAME.encode(), _IFF_UP))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _setns(netns: int) -> None:
    _done(_libc().setns(netns, _CLONE_NEWNET))


def _unshare() -> None:
    _done(_libc().unshare(_CLONE_NEWNET))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _done(status: int) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
