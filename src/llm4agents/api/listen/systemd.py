"""What systemd is told (sd_notify): up, going, how it is, and that the event loop still turns. Nothing without it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket


def asked() -> bool:
    """Whether systemd (or what speaks like it) waits for what we tell: it manages this process."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


def tell(message: str) -> None:
    """One message to `$NOTIFY_SOCKET`, if there is one (`READY=1`, `STOPPING=1`, `STATUS=…`)."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(message.encode(), b"\0" + path[1:].encode() if path[0] == "@" else path)


async def watchdog() -> None:
    """For ever: tells it at half the interval it waits (`WatchdogSec`), as long as this event loop turns."""
    try:
        interval_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
    except ValueError:
        return
    if interval_s <= 0 or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while True:
        tell("WATCHDOG=1")
        await asyncio.sleep(interval_s / 2)
