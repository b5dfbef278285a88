"""The audit read while the gateway's own writer writes it: torn lines, files that take turns, followers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from llm4agents.barrier import audit_read
from llm4agents.barrier.audit_read import Wanted, follow, read
from llm4agents.barrier.gateway.audit import Audit

ID = "sbx_aaaaaaaaaaaaaaaaaaaa"
ALL = Wanted()


def lines(path: Path, *records: dict[str, Any]) -> None:
    with path.open("ab") as file:
        file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))


def test_both_files_in_order_filtered_and_bounded(tmp_path: Path) -> None:
    lines(
        tmp_path / f"{ID}.1.jsonl",
        {"at": 1, "kind": "dns", "verdict": "deny"},
        {"at": 2, "kind": "packet", "verdict": "deny"},
    )
    lines(
        tmp_path / f"{ID}.jsonl",
        {"at": 3, "kind": "request", "verdict": "allow"},
        {"at": 4, "kind": "dns", "verdict": "allow"},
    )

    def at(wanted: Wanted, limit: int = 10) -> list[float]:
        return [record["at"] for record in read(tmp_path, ID, wanted, limit)]

    assert at(ALL) == [1, 2, 3, 4] and at(ALL, 2) == [3, 4]
    assert at(Wanted(verdict="deny")) == [1, 2]
    assert at(Wanted(kinds=("dns", "request"))) == [1, 3, 4]
    assert at(Wanted(after=2)) == [3, 4]
    assert read(tmp_path, "sbx_b", ALL, 10) == [] and read(tmp_path / "no", ID, ALL, 10) == []


def test_what_is_no_record_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / f"{ID}.jsonl"
    path.write_bytes(b'{"at": 1}\n{"at": 2, "na\n[3]\n\xff\xfe\n' + b"x" * 200_000 + b'\n{"at": 4}\n{"at": 5')
    assert [record["at"] for record in read(tmp_path, ID, ALL, 10)] == [1, 4]


def test_a_follower_hears_all_of_a_real_writer_over_turns(tmp_path: Path) -> None:
    async def test() -> None:
        audit = Audit(tmp_path, ID, bytes_max=8_192)
        ended = False
        audit.write({"kind": "dns", "number": 0})
        audit.flush()
        heard: list[int] = []

        async def listen() -> None:
            async for record in follow(tmp_path, ID, Wanted(kinds=("dns",)), 10, lambda: ended):
                heard.append(record["number"])

        listener = asyncio.create_task(listen())
        for number in range(1, 120):
            audit.write({"kind": "dns", "number": number, "reason": "x" * 60})
            audit.write({"kind": "packet", "number": number})
            audit.flush()
            async with asyncio.timeout(10):
                while len(heard) <= number:
                    await asyncio.sleep(0)
        assert (tmp_path / f"{ID}.1.jsonl").exists()
        ended = True
        await asyncio.wait_for(listener, 10)
        assert heard == list(range(120))
        audit.close()

    asyncio.run(test())


def test_a_follower_of_what_does_not_exist_yet(tmp_path: Path) -> None:
    async def test() -> None:
        ended = False
        directory = tmp_path / "later"
        stream = follow(directory, ID, ALL, 10, lambda: ended)
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        directory.mkdir()
        lines(directory / f"{ID}.jsonl", {"at": 1})
        assert await asyncio.wait_for(first, 10) == {"at": 1}
        half = json.dumps({"at": 2}).encode() + b"\n"
        second = asyncio.ensure_future(anext(stream))
        for part in (half[:4], half[4:]):
            with (directory / f"{ID}.jsonl").open("ab") as file:
                file.write(part)
            await asyncio.sleep(0.01)
        assert await asyncio.wait_for(second, 10) == {"at": 2}
        await stream.aclose()

    asyncio.run(test())


def test_kinds_are_those_of_the_design() -> None:
    assert set(audit_read.KINDS) == {"dns", "connection", "request", "packet", "policy", "gateway"}
