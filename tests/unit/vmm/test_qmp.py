"""The monitor client against a peer that speaks the protocol, or does not."""

import array
import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from llm4agents.errors import ConnectionLostError, VmmError
from llm4agents.vmm.qemu import qmp
from llm4agents.vmm.qemu.qmp import Qmp


class Peer:
    """The other end, by hand."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.buffer = b""

    async def command(self) -> dict[str, Any]:
        while b"\n" not in self.buffer:
            self.buffer += await asyncio.get_running_loop().sock_recv(self.sock, 4096)
        line, _, self.buffer = self.buffer.partition(b"\n")
        body: dict[str, Any] = json.loads(line)
        return body

    async def say(self, *bodies: object) -> None:
        data = b"".join(
            body if isinstance(body, bytes) else json.dumps(body).encode() + b"\n" for body in bodies
        )
        await asyncio.get_running_loop().sock_sendall(self.sock, data)


def play(test: Callable[[Qmp, Peer, list[dict[str, Any]]], Awaitable[None]]) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        events: list[dict[str, Any]] = []
        client = Qmp(ours, events.append)
        try:
            async with asyncio.timeout(10):
                await test(client, Peer(theirs), events)
        finally:
            client.close()
            theirs.close()

    asyncio.run(main())


def test_answers_find_their_commands_between_greeting_and_events() -> None:
    async def test(client: Qmp, peer: Peer, events: list[dict[str, Any]]) -> None:
        first, second = client.send("one"), client.send("two", node_name="x")
        a, b = await peer.command(), await peer.command()
        assert (a["execute"], b["execute"], b["arguments"]) == ("one", "two", {"node-name": "x"})
        await peer.say(
            {"QMP": {}}, {"event": "STOP"}, {"return": 1, "id": a["id"]}, {"return": 2, "id": b["id"]}
        )
        assert (await first, await second) == (1, 2)
        assert [event["event"] for event in events] == ["STOP"]

    play(test)


def test_a_refusal_is_an_error_in_its_words() -> None:
    async def test(client: Qmp, peer: Peer, events: list[dict[str, Any]]) -> None:
        future = client.send("cont")
        number = (await peer.command())["id"]
        await peer.say({"id": number, "error": {"class": "GenericError", "desc": "not now"}})
        with pytest.raises(VmmError, match="refused cont: not now"):
            await future
        # By a guest that has taken QEMU over: nothing moves the terminal that shows it.
        future = client.send("cont")
        number = (await peer.command())["id"]
        await peer.say({"id": number, "error": {"desc": "\x1b[2J\u202eok\n" + "x" * 9_999}})
        with pytest.raises(VmmError) as caught:
            await future
        assert caught.value.message.isprintable()
        assert len(caught.value.message) < 600

    play(test)


def test_a_descriptor_travels_with_its_command() -> None:
    async def test(client: Qmp, peer: Peer, events: list[dict[str, Any]]) -> None:
        read, write = os.pipe()
        client.send("getfd", fd=write, fdname="state")
        os.close(write)
        data, ancillary, _, _ = peer.sock.recvmsg(4096, 64)
        assert json.loads(data)["arguments"] == {"fdname": "state"}
        received = array.array("i", ancillary[0][2])
        os.write(received[0], b"ok")
        assert os.read(read, 2) == b"ok"
        os.close(received[0])
        os.close(read)

    play(test)


@pytest.mark.parametrize(
    "noise", [b"garbage\n", b"[1]\n", b"[" * 100_000 + b"\n", b"x" * (qmp.LINE_BYTES_MAX + 70_000)]
)
def test_what_is_not_the_protocol_ends_the_connection(noise: bytes) -> None:
    async def test(client: Qmp, peer: Peer, events: list[dict[str, Any]]) -> None:
        future = client.send("stop")
        sending = asyncio.create_task(peer.say(noise))
        with pytest.raises(ConnectionLostError):
            await future
        assert client.closed
        sending.cancel()
        with pytest.raises(ConnectionLostError):
            await client.execute("stop")

    play(test)


def test_odd_but_harmless_messages_are_passed_over() -> None:
    async def test(client: Qmp, peer: Peer, events: list[dict[str, Any]]) -> None:
        future = client.send("stop")
        number = (await peer.command())["id"]
        await peer.say(
            {}, {"id": 99, "return": 0}, {"id": "x"}, {"event": 5}, b"\r\n", {"id": number, "return": {}}
        )
        assert await future == {}

    play(test)


def test_the_end_of_the_peer_is_told_to_everyone_waiting() -> None:
    async def test(client: Qmp, peer: Peer, events: list[dict[str, Any]]) -> None:
        futures = [client.send("stop"), client.send("cont")]
        peer.sock.close()
        for future in futures:
            with pytest.raises(ConnectionLostError):
                await future

    play(test)


def test_no_answer_is_not_waited_for_for_ever() -> None:
    async def test(client: Qmp, peer: Peer, events: list[dict[str, Any]]) -> None:
        with pytest.raises(ConnectionLostError, match="did not answer stop"):
            await client.execute("stop", timeout=0.05)

    play(test)
