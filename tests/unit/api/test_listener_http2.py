"""HTTP/2 of the listener: with prior knowledge, against clients that know the protocol too well."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.settings
import httpx
import pytest
from hyperframe.frame import ContinuationFrame, HeadersFrame, PingFrame, SettingsFrame

from llm4agents.api.listen.counting import Bounds
from tests.support import eventually
from tests.unit.api.listening import Served, ask, closed, serving

HEAD = [(":method", "GET"), (":path", "/health"), (":scheme", "http"), (":authority", "localhost")]


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """`/len`: how long the body was. `/big`: 3 MiB. `/cut`: an answer that breaks off. `/never`: never."""

    async def whole(body: bytes, headers: Any = ()) -> None:
        start = [(b"content-length", str(len(body)).encode()), *headers]
        await send({"type": "http.response.start", "status": 200, "headers": start})
        await send({"type": "http.response.body", "body": body})

    if scope["path"] == "/len":
        size = 0
        while True:
            message = await receive()
            size += len(message.get("body", b""))
            if not message.get("more_body"):
                break
        await whole(
            str(size).encode(),
            [
                (b"connection", b"keep-alive"),
                (b"x-cookie", b"|".join(value for name, value in scope["headers"] if name == b"cookie")),
            ],
        )
    elif scope["path"] == "/big":
        await whole(b"x" * (3 << 20))
    elif scope["path"] == "/cut":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
    elif scope["path"] == "/never":
        while (await receive())["type"] != "http.disconnect":
            pass
    else:
        await whole(scope["http_version"].encode())


class Client:
    """One connection, driven by hand."""

    def __init__(self, served: Served, **settings: int) -> None:
        self.sock = served.connect()
        self.conn = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.conn.initiate_connection()
        if settings:
            self.conn.update_settings(
                {h2.settings.SettingCodes[name]: value for name, value in settings.items()}
            )
        self.flush()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def flush(self) -> None:
        self.sock.sendall(self.conn.data_to_send())

    def request(self, path: str, *, method: str = "GET", end: bool = True, more: Any = ()) -> int:
        ident = self.conn.get_next_available_stream_id()
        head = [(":method", method), (":path", path), *HEAD[2:], *more]
        self.conn.send_headers(ident, head, end_stream=end)
        self.flush()
        return ident

    def until(self, done: Callable[[h2.events.Event], Any], *, credit: bool = True) -> list[h2.events.Event]:
        """Events up to the one that `done` says is enough."""
        seen: list[h2.events.Event] = []
        while True:
            data = self.sock.recv(65_536)
            assert data, f"closed after {seen[-3:]}"
            for event in self.conn.receive_data(data):
                seen.append(event)
                if credit and isinstance(event, h2.events.DataReceived):
                    self.conn.acknowledge_received_data(
                        event.flow_controlled_length or 0, event.stream_id or 0
                    )
                if done(event):
                    self.flush()
                    return seen
            self.flush()

    def answer(self, ident: int) -> tuple[str, bytes]:
        events = self.until(
            lambda event: isinstance(event, h2.events.StreamEnded) and event.stream_id == ident
        )
        mine = [event for event in events if getattr(event, "stream_id", None) == ident]
        status = next(
            dict(e.headers or [])[":status"] for e in mine if isinstance(e, h2.events.ResponseReceived)
        )
        return status, b"".join(e.data or b"" for e in mine if isinstance(e, h2.events.DataReceived))

    def ended_with(self) -> int | None:
        """The error of the GOAWAY that the server ends it with."""
        code = None
        try:
            while data := self.sock.recv(65_536):
                for event in self.conn.receive_data(data):
                    if isinstance(event, h2.events.ConnectionTerminated):
                        code = int(event.error_code or 0)
        except OSError:
            pass
        return code


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    bounds = Bounds(
        head_s=0.5, keep_alive_s=1, streams=20, resets=(50, 10), control=(100, 10), stall_s=0.5, linger_s=0.3
    )
    with serving(tmp_path_factory.mktemp("h2"), bounds, _app) as made:
        yield made


def fine(served: Served) -> None:
    with served.connect("127.0.0.9") as sock:
        sock.settimeout(5)
        assert ask(sock, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")[0] == 200


def test_many_requests_on_one_connection(served: Served) -> None:
    async def main() -> None:
        async with httpx.AsyncClient(base_url=served.url, http1=False, http2=True) as http:
            answers = await asyncio.gather(*(http.post("/len", content=b"x" * 200_000) for _ in range(15)))
            assert {answer.text for answer in answers} == {"200000"}
            assert {answer.http_version for answer in answers} == {"HTTP/2"}
            assert "connection" not in answers[0].headers
            assert len((await http.get("/big")).content) == 3 << 20
            head = await http.head("/big")
            assert head.content == b"" and head.headers["content-length"] == str(3 << 20)
            crumbs = await http.post("/len", headers=[("cookie", "a=1"), ("cookie", "b=2")])
            assert crumbs.headers["x-cookie"] == "a=1; b=2"

    asyncio.run(main())


def test_an_upload_nobody_reads_holds_up_no_other_stream(served: Served) -> None:
    with Client(served) as client:
        held = client.request("/never", method="PUT", end=False)
        client.until(lambda event: isinstance(event, h2.events.SettingsAcknowledged))
        for _ in range(4):
            client.conn.send_data(held, b"x" * 16_000)
        client.flush()
        assert client.answer(client.request("/big"))[1] == b"x" * (3 << 20)


def test_an_answer_that_breaks_off_does_not_look_whole(served: Served) -> None:
    with Client(served) as client:
        ident = client.request("/cut")
        events = client.until(lambda event: isinstance(event, h2.events.StreamReset | h2.events.StreamEnded))
        assert isinstance(events[-1], h2.events.StreamReset) and events[-1].stream_id == ident
        assert client.answer(client.request("/x"))[1] == b"2"  # the connection goes on


def test_a_client_that_reads_nothing_holds_little_and_up_nobody(served: Served) -> None:
    with Client(served, INITIAL_WINDOW_SIZE=0) as client:
        for _ in range(20):
            client.request("/big")
        fine(served)
        with contextlib.suppress(OSError):
            client.request("/x")  # one stream more than there may be
        assert client.ended_with() in (1, 7, None)
    eventually(lambda: served.figures()["listener_connections"] == 0, 5)


def test_rapid_resets_end_the_connection(served: Served) -> None:
    with Client(served) as client:
        try:
            for _ in range(200):
                ident = client.request("/never")
                client.conn.reset_stream(ident, 8)
                client.flush()
        except OSError:
            pass
        assert client.ended_with() in (11, None)  # ENHANCE_YOUR_CALM, if a reset has not swallowed it
    fine(served)
    eventually(lambda: served.figures()["listener_connections"] == 0, 5)
    assert served.do(_tasks(served)) == 0


async def _tasks(served: Served) -> int:
    tasks = served.listener._shared.state.tasks
    if tasks:
        await asyncio.wait(tasks, timeout=5)
    return len(tasks)


@pytest.mark.parametrize(
    "noise",
    [
        PingFrame(0, b"12345678").serialize(),
        SettingsFrame(0).serialize(),
        b"\0\0\x05\x02\0\0\0\0\x01\0\0\0\0\x10",  # PRIORITY
        b"\0\0\0\xaa\0\0\0\0\0",  # a frame of no known type
        # What follows is no event of h2's, or looks like work:
        b"\0\0\0\x04\x01\0\0\0\0",  # SETTINGS acknowledged
        b"\0\0\0\0\0\0\0\0\x01",  # DATA of a stream that is over
        b"\0\0\x04\x03\0\0\0\0\x01\0\0\0\0",  # RST_STREAM, again and again
        b"\0\0\x04\x08\0\0\0\0\0\0\0\0\x01",  # WINDOW_UPDATE by a byte
    ],
    ids=["ping", "settings", "priority", "unknown", "acks", "dead-data", "dead-resets", "windows"],
)
def test_noise_ends_the_connection(served: Served, noise: bytes) -> None:
    with Client(served) as client:
        assert client.answer(client.request("/x"))[1] == b"2"
        try:
            for _ in range(10):
                client.sock.sendall(noise * 50)
        except OSError:
            pass
        assert client.ended_with() in (11, None)
    fine(served)


def test_a_client_holds_no_memory_by_its_word_alone(served: Served) -> None:
    with Client(served) as client:  # a frame that says it has 16 MiB is refused by its head
        client.sock.sendall(b"\xff\xff\xff\0\0\0\0\0\x01" + b"x" * 30_000)
        assert client.ended_with() in (6, None)  # FRAME_SIZE_ERROR
    with Client(served, HEADER_TABLE_SIZE=2**32 - 1) as client:  # of our heads little is remembered
        assert client.answer(client.request("/x"))[1] == b"2"
        (connection,) = served.listener._shared.state.connections
        assert connection.conn.encoder.header_table_size == 4_096  # type: ignore[attr-defined]
        assert client.answer(client.request("/x"))[1] == b"2"
    fine(served)


def test_heads_without_end_are_refused(served: Served) -> None:
    with Client(served) as client:  # CONTINUATION after CONTINUATION
        client.sock.sendall(HeadersFrame(1, b"\x82").serialize())
        try:
            for _ in range(100):
                client.sock.sendall(ContinuationFrame(1, b"\0\x01a\x01b" * 3_000).serialize())
        except OSError:
            pass
        assert client.ended_with() in (1, 11, None)
    with Client(served) as client:  # small on the wire, large when it is unpacked
        client.request("/x", more=[("x-a", "a" * 3_000)] * 20)
        assert client.ended_with() == 11  # ENHANCE_YOUR_CALM
    with served.connect() as sock:  # a preface that does not end, or is followed by nothing
        sock.sendall(b"PRI * HTTP/2.0\r\n")
        assert closed(sock)
    with Client(served) as client:
        assert client.ended_with() == 0
    fine(served)


@pytest.mark.parametrize(
    "head",
    [
        [
            (":method", "GET"),
            (":scheme", "http"),
            (":path", "/x"),
            (":authority", "localhost"),
            ("host", "evil.example"),
        ],
        [(":method", "CONNECT"), (":authority", "localhost")],
        [
            (":method", "GET"),
            (":scheme", "http"),
            (":path", "http://evil.example/"),
            (":authority", "localhost"),
        ],
        [(":method", "GET"), (":scheme", "http"), (":path", "/x"), (":authority", "evil.example")],
        [(":method", "GET"), (":scheme", "http"), (":path", "/x")],
    ],
    ids=["two-hosts", "connect", "absolute", "other-host", "no-host"],
)
def test_heads_that_mean_another_host_are_refused(served: Served, head: list[tuple[str, str]]) -> None:
    with Client(served) as client:
        client.conn.config.validate_outbound_headers = False
        client.conn.send_headers(1, head, end_stream=True)
        client.flush()
        try:
            events = client.until(
                lambda event: isinstance(
                    event,
                    h2.events.StreamReset | h2.events.ResponseReceived | h2.events.ConnectionTerminated,
                )
            )
        except (AssertionError, ConnectionError):
            return
        last = events[-1]
        if isinstance(last, h2.events.ResponseReceived):
            assert dict(last.headers or [])[":status"] in ("400", "421")


def test_a_body_that_does_not_come(served: Served) -> None:
    with Client(served) as client:
        ident = client.request("/len", method="POST", end=False, more=[("content-length", "100")])
        client.conn.send_data(ident, b"x")
        client.flush()
        events = client.until(lambda event: isinstance(event, h2.events.ResponseReceived))
        assert dict(events[-1].headers or [])[":status"] == "408"  # type: ignore[attr-defined]


def test_a_drain_lets_streams_end_and_takes_no_new_one(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await release.wait()
        await _app(scope, receive, send)

    with serving(tmp_path, None, slow) as served, Client(served) as client:
        first = client.request("/x")
        eventually(lambda: served.listener._shared.state.tasks, 5)
        served.do(served.listener.leave())
        refused = client.request("/x")
        events = client.until(lambda event: isinstance(event, h2.events.StreamReset))
        assert (events[-1].stream_id, events[-1].error_code) == (refused, 7)  # type: ignore[attr-defined]

        async def let() -> None:
            release.set()

        served.do(let())
        assert client.answer(first)[1] == b"2"
        assert client.ended_with() in (0, None)  # it came with the answer
