"""A network namespace with the tap a NIC ends in when it is connected to nothing. As root.

A clone's shape is its template's, so every machine has a NIC, and Firecracker's NIC is a tap that it opens by name.
Not here: the namespace of a sandbox with a network (`barrier.link`).
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import struct
import threading
from typing import Final

from llm4agents.errors import HostSetupError
from llm4agents.vmm.base import TAP_NAME

_CLONE_NEWNET: Final = 0x4000_0000
_TUNSETIFF, _TUNSETPERSIST, _TUNSETOWNER = 0x4004_54CA, 0x4004_54CB, 0x4004_54CC
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x2, 0x1000, 0x4000


def own(tap: int, uid: int) -> None:
    """Let processes of `uid` open the tap of this descriptor by its name, when nobody else has it open. OSError."""
    fcntl.ioctl(tap, _TUNSETOWNER, uid)


async def make(uid: int) -> int:
    """A descriptor of a new namespace that has nothing in it but a tap of `uid`, which is down; the caller closes it.

    Raises HostSetupError.
    """
    try:
        return await asyncio.to_thread(_in_a_thread, uid)
    except OSError as error:
        raise HostSetupError(
            f"a network namespace with a tap cannot be made: {error.strerror}",
            hint="the kernel module tun is needed: modprobe tun",
        ) from error


def _in_a_thread(uid: int) -> int:
    """In a thread that ends with it: to the kernel, a namespace is a thread's."""
    found: list[int | OSError] = []

    def act() -> None:
        try:
            found.append(_made(uid))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=act, name="a namespace")
    thread.start()
    thread.join()
    result = found[0]
    if isinstance(result, OSError):
        raise result
    return result


def _made(uid: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        request = struct.pack("16sH22x", TAP_NAME.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR)
        fcntl.ioctl(tun, _TUNSETIFF, request)
        own(tun, uid)
        # It lives as long as its namespace: until the VMM has ended, and we have closed the descriptor.
        fcntl.ioctl(tun, _TUNSETPERSIST, 1)
    finally:
        os.close(tun)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
