"""Messages and descriptors over a real socket pair."""

from __future__ import annotations

import os
import socket

import pytest

from llm4agents.barrier import wire


def test_a_message_and_its_descriptors_arrive_whole() -> None:
    ours, theirs = wire.pair()
    reader, writer = os.pipe()
    with ours, theirs:
        wire.send(ours, {"op": "join", "sandbox": "sbx_1"}, [writer])
        os.close(writer)
        message, fds = wire.receive(theirs)
        assert message == {"op": "join", "sandbox": "sbx_1"}
        assert len(fds) == 1 and not os.get_inheritable(fds[0])
        os.write(fds[0], b"x")
        wire.close(fds)
        assert os.read(reader, 2) == b"x" and os.read(reader, 1) == b""
    os.close(reader)


def test_the_longest_message_fits_and_a_longer_one_is_refused() -> None:
    ours, theirs = wire.pair()
    with ours, theirs:
        text = "x" * (wire.BYTES_MAX - len('{"t":""}'))
        wire.send(ours, {"t": text})
        assert wire.receive(theirs)[0] == {"t": text}
        with pytest.raises(wire.WireError, match="at most"):
            wire.send(ours, {"t": text + "x"})


@pytest.mark.parametrize("raw", [b"x", b"[1]", b"\xff", b"{" * 100])
def test_what_is_no_message_is_refused(raw: bytes) -> None:
    ours, theirs = wire.pair()
    with ours, theirs:
        reader, writer = os.pipe()
        socket.send_fds(ours, [raw], [writer])
        os.close(writer)
        with pytest.raises(wire.WireError):
            wire.receive(theirs)
        assert os.read(reader, 1) == b"", "its descriptors are closed"
        os.close(reader)


def test_a_peer_that_has_gone_is_told() -> None:
    ours, theirs = wire.pair()
    with theirs:
        ours.close()
        with pytest.raises(wire.WireError, match="gone"):
            wire.receive(theirs)
        with pytest.raises(wire.WireError, match="gone"):
            wire.send(theirs, {})
