"""Bytes that are much work: what one connection sends holds no other up, and nothing of it is lost or reordered."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from llm4agents import limits
from llm4agents.api.listen.turns import Fed, Turns


class Transport:
    """What a protocol sees of a transport."""

    def __init__(self) -> None:
        self.reading, self.closing = True, False

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_closing(self) -> bool:
        return self.closing


async def _until(done: Any) -> None:
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0)


def test_much_work_is_done_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        turns, got = Turns(), [bytearray() for _ in range(4)]
        ends = [Transport() for _ in got]
        data = bytes(range(256)) * 256

        def slow(into: bytearray, piece: bytes) -> None:
            until = time.thread_time() + len(piece) * 2e-6  # 131 ms for all
            into += piece
            while time.thread_time() < until:
                pass

        feds = [Fed(turns, lambda piece, into=into: slow(into, piece), lambda: False) for into in got]  # type: ignore[misc]
        for fed, end in zip(feds, ends, strict=True):
            fed.feed(end, data)  # type: ignore[arg-type]
            assert not end.reading and len(fed)
        others = 0
        while any(len(fed) for fed in feds):
            others += 1
            await asyncio.sleep(0)
        assert others > 4 * 5  # each came to wait many times
        assert all(into == data for into in got) and all(end.reading for end in ends)

    asyncio.run(main())


def test_what_nobody_takes_waits_and_what_is_closed_is_dropped() -> None:
    async def main() -> None:
        turns, got, end, full = Turns(), bytearray(), Transport(), False

        def take(piece: bytes) -> None:
            nonlocal full
            got.extend(piece)
            full = True
            end.pause_reading()

        fed = Fed(turns, take, lambda: full)
        data = bytes(200) + b"x" * 30_000
        fed.feed(end, data)  # type: ignore[arg-type]
        assert len(got) == limits.LISTEN_PIECE_BYTES and not end.reading
        while len(got) < len(data):
            before, full = len(got), False
            end.resume_reading()
            fed.again()  # as the protocol does when its application has taken what there was
            assert not end.reading
            await _until(lambda before=before: len(got) > before)
        assert got == data
        full = False
        fed.feed(end, data)  # type: ignore[arg-type]
        end.closing, full = True, False
        fed.again()
        await _until(lambda: not len(fed))

    asyncio.run(main())
