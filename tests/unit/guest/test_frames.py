"""The codec: what is encoded is decoded whatever the splits; what is not a frame is never delivered."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm4agents.guest import frames
from llm4agents.guest.frames import Decoder, Frame, encode, preamble, session_tag
from llm4agents.limits import FRAME_PAYLOAD_BYTES_MAX, HUNT_BYTES_MAX

NONCE = b"\x07\x06\x05\x04\x03\x02\x01\x00"
TAG = session_tag(NONCE)

a_frame = st.builds(
    Frame,
    stream=st.integers(0, 2**32 - 1),
    type=st.integers(0, 255),
    flags=st.integers(0, 255),
    payload=st.one_of(
        st.binary(max_size=300), st.integers(0, FRAME_PAYLOAD_BYTES_MAX).map(lambda n: b"\xa5" * n)
    ),
)


def wire(wanted: list[Frame], tag: int = TAG) -> bytes:
    return b"".join(encode(tag, frame.stream, frame.type, frame.flags, frame.payload) for frame in wanted)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@given(
    junk=st.binary(max_size=200),
    wanted=st.lists(a_frame, max_size=8),
    cuts=st.lists(st.integers(0, 2**31), max_size=20),
)
def test_frames_survive_any_split(junk: bytes, wanted: list[Frame], cuts: list[int]) -> None:
    decoder = Decoder(NONCE)
    got: list[Frame] = []
    for piece in split(junk + preamble(NONCE) + wire(wanted), cuts):
        got += decoder.feed(piece)
    assert got == wanted
    assert decoder.error is None


@given(wanted=st.lists(a_frame, min_size=1, max_size=3), where=st.integers(0), bit=st.integers(0, 7))
def test_a_flipped_bit_outside_payloads_is_never_delivered(wanted: list[Frame], where: int, bit: int) -> None:
    data = bytearray(wire(wanted))
    envelope: list[int] = []
    at = 0
    for frame in wanted:
        trailer = at + 16 + len(frame.payload)
        envelope += [*range(at, at + 16), *range(trailer, trailer + 4)]
        at = trailer + 4
    data[envelope[where % len(envelope)]] ^= 1 << bit
    decoder = Decoder(NONCE)
    got = decoder.feed(preamble(NONCE) + bytes(data))
    assert got == wanted[: len(got)]
    assert len(got) < len(wanted)
    assert decoder.error is not None


@given(pieces=st.lists(st.binary(max_size=2_000), max_size=20))
def test_random_bytes_are_an_error_or_nothing(pieces: list[bytes]) -> None:
    decoder = Decoder(NONCE)
    assert decoder.feed(preamble(NONCE)) == []
    got: list[Frame] = []
    for piece in pieces:
        got += decoder.feed(piece)
    assert got == []
    if sum(map(len, pieces)) >= frames.HEADER.size:
        assert decoder.error is not None


def test_another_sessions_frames_are_discarded_before_and_an_error_after() -> None:
    old = encode(TAG + 1, 3, 5, 0, b"old")
    decoder = Decoder(NONCE)
    good = encode(TAG, 3, 5, 0, b"new")
    assert decoder.feed(old + preamble(NONCE) + good) == [Frame(3, 5, 0, b"new")]
    assert decoder.feed(good + old + good) == [Frame(3, 5, 0, b"new")]
    assert decoder.error is not None
    assert decoder.feed(good) == []


def test_what_precedes_the_greeting_is_bounded() -> None:
    decoder = Decoder(NONCE)
    block = bytes(1 << 20)
    for _ in range(HUNT_BYTES_MAX // len(block)):
        decoder.feed(block)
        assert decoder.error is None
    decoder.feed(bytes(64))
    assert decoder.error is not None


def test_a_length_over_the_limit_is_refused_at_its_header() -> None:
    length = FRAME_PAYLOAD_BYTES_MAX + 1
    header = frames.HEADER.pack(length, TAG, 1, 5, 0, frames.header_check(length, TAG, 1, 5, 0))
    decoder = Decoder(NONCE)
    decoder.feed(preamble(NONCE) + header)
    assert decoder.error is not None


def test_the_magic_cannot_be_a_header() -> None:
    for nonce in (NONCE, b"\x01" + bytes(7), b"\xff" * 8):
        length, session, stream, kind, flags, check = frames.HEADER.unpack(preamble(nonce))
        assert length > FRAME_PAYLOAD_BYTES_MAX or check != frames.header_check(
            length, session, stream, kind, flags
        )


def test_a_nonce_without_a_tag_is_no_nonce() -> None:
    with pytest.raises(ValueError, match="nonce"):
        preamble(b"\0\0\0\0abcd")
