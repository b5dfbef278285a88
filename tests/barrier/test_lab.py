"""The lab itself: what the world answers, and that what leaves the host is seen."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from tests.barrier.attacks.kit import frame, ip4, tcp_segment
from tests.barrier.lab import Lab, laboratory
from tests.barrier.smuggles import smuggled, smuggles
from tests.barrier.world import HOST, NAMES, WORLD
from tests.support import eventually

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with laboratory() as lab:
        yield lab
    assert not lab.host.exists()


def on_host(lab: Lab, *argv: str) -> str:
    return subprocess.run(
        [*lab.enter(), *argv], capture_output=True, text=True, timeout=20, check=True
    ).stdout


def test_every_address_answers_and_says_which_it_is(lab: Lab) -> None:
    for address in ("93.184.216.34", "10.0.0.5", "169.254.169.254", "2001:db8:77::1"):
        mark = lab.mark()
        assert lab.dial(address, 22) == b"lab ready\n"
        assert [one.address for one in lab.arrived(mark, kind="tcp", port=22)] == [address]
        lab.settle()
        assert address in {packet.destination for packet in lab.left(mark)}


def test_names_resolve_as_a_test_wants_and_queries_are_seen(lab: Lab) -> None:
    answers = iter([["93.184.216.34"], ["10.0.0.5"]])
    lab.names["changing.example.com"] = lambda: next(answers)
    mark = lab.mark()
    found = [on_host(lab, "getent", "ahostsv4", "changing.example.com").split()[0] for _ in range(2)]
    assert found == ["93.184.216.34", "10.0.0.5"]
    assert [one.to for one in lab.asked(mark)] == [WORLD, WORLD]
    with pytest.raises(subprocess.CalledProcessError):
        on_host(lab, "getent", "ahostsv4", "nowhere.example.com")


def test_https_is_trusted_with_the_labs_authority_alone(lab: Lab) -> None:
    mark = lab.mark()
    trusting = ["curl", "-sS", "--cacert", str(lab.authority.certificate)]
    assert '"origin": "93.184.216.34:443"' in on_host(lab, *trusting, "https://api.example.com/echo")
    assert lab.arrived(mark, kind="https", sni="api.example.com", target="/echo")
    for refused in (
        ["curl", "-sS", "https://api.example.com/"],
        [*trusting, "https://untrusted.example.com/"],
    ):
        with pytest.raises(subprocess.CalledProcessError):
            on_host(lab, *refused)


def test_packets_of_any_kind_are_witnessed(lab: Lab) -> None:
    mark = lab.mark()
    lab.send("8.8.8.8", 443, b"datagram")
    lab.send("2001:db8:77::1", 443, b"datagram of six")
    lab.send_frame(bytes(12) + b"\x88\xcc" + b"frame of another kind")
    lab.settle()
    packets = lab.left(mark)
    assert {bytes(packet.payload) for packet in packets} >= {
        b"datagram",
        b"datagram of six",
        b"frame of another kind",
    }
    assert {packet.source for packet in packets} >= {HOST}


def test_what_belongs_to_no_connection_is_witnessed_too(lab: Lab) -> None:
    mark = lab.mark()
    lab.send_frame(frame(ip4("93.184.216.66", 6, tcp_segment("93.184.216.66", 80, flags=0x18, data=b"out"))))
    lab.dial("93.184.216.34", 80, b"GET / HTTP/1.0\r\n\r\n")
    lab.settle()
    assert [one.payload for one in lab.left(mark) if one.destination == "93.184.216.66"] == [b"out"]
    assert len([one for one in lab.left(mark) if one.destination == "93.184.216.34"]) == 1, "its SYN alone"


BOTH = {"minus", "chunk of odd size", "chunk's extension", "chunk ended by LF", "trailer"}


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("api.example.com", {"CL.TE", "two lengths", "coding twice", "tab", "vertical tab", "blank before colon",
                             "case"}),
        ("te.example.com", {"CL.TE", "two lengths", "coding twice", "tab", "vertical tab", "blank before colon", "case",
                            "unknown coding", "coding listed", "chunked, then another", "quoted"}),
        ("cl.example.com", {"TE.CL", "two lengths, swapped"}),
    ],
)  # fmt: skip
def test_origins_can_be_smuggled_to_where_nothing_is_between(lab: Lab, name: str, ways: set[str]) -> None:
    """The control of `attacks/test_http.py::test_smuggling`: what is refused there does harm here."""
    mark = lab.mark()
    for how in ways | BOTH:
        lab.dial(NAMES[name][0], 80, smuggles(name)[how])

    def found() -> set[str]:
        return set(smuggled([one.target for one in lab.arrived(mark, kind="http")]))

    eventually(lambda: found() == ways | BOTH, 5)
