"""Messages between the server and the barrier's processes: one JSON object and some descriptors in each.

SOCK_SEQPACKET keeps messages whole and tells of a peer's end, so there is no framing to get wrong. Standard library
only: the interceptor imports this in an environment of its own.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from llm4agents import limits

FDS_MAX = 8
BYTES_MAX = limits.CONTROL_MESSAGE_BYTES_MAX


class WireError(Exception):
    """The peer has gone, or said something that is no message."""


def encode(message: dict[str, Any]) -> bytes:
    """Raises WireError when it is too long for one message."""
    raw = json.dumps(message, separators=(",", ":")).encode()
    if len(raw) > BYTES_MAX:
        raise WireError(f"a message of {len(raw)} bytes; at most {BYTES_MAX} fit")
    return raw


def decode(raw: bytes) -> dict[str, Any]:
    try:
        message = json.loads(raw)
    except ValueError as error:
        raise WireError(f"not JSON: {error}") from None
    if not isinstance(message, dict):
        raise WireError("not an object")
    return message


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends with room for the longest message."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    for end in ends:
        enlarge(end)
    return ends


def enlarge(sock: socket.socket) -> None:
    """Room for a few of the longest messages."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * BYTES_MAX)


def send(sock: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """One message. The caller keeps his copies of `fds`. Raises BlockingIOError (a non-blocking socket whose peer
    does not read), WireError."""
    send_raw(sock, encode(message), fds)


def send_raw(sock: socket.socket, raw: bytes, fds: Sequence[int] = ()) -> None:
    """What `encode` made, as `send` does."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg([raw], ancillary)
    except BlockingIOError:
        raise
    except OSError as error:
        raise WireError(f"the peer has gone: {error.strerror}") from error


def receive(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next message and its descriptors (close-on-exec; the caller closes them).

    Raises BlockingIOError when there is none yet on a non-blocking socket, WireError at the peer's end or for what is
    no message (its descriptors are closed).
    """
    size = array.array("i").itemsize
    try:
        raw, ancillary, flags, _ = sock.recvmsg(
            BYTES_MAX + 1, socket.CMSG_SPACE(FDS_MAX * size), socket.MSG_CMSG_CLOEXEC
        )
    except BlockingIOError:
        raise
    except OSError as error:
        raise WireError(f"the peer has gone: {error.strerror}") from error
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % size])
    try:
        if not raw:
            raise WireError("the peer has gone")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise WireError("a message too long, or with too many descriptors")
        return decode(raw), list(fds)
    except WireError:
        close(fds)
        raise


def close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
