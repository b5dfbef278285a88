"""A gateway or an interceptor that dies: the namespace is shut, and all is as it was when there is one again."""

from __future__ import annotations

import os
import signal

import pytest

from tests.barrier.attacks.guest import GATEWAY, INTERCEPTOR, Case, Guest
from tests.barrier.attacks.kit import fetch, resolve, tcp
from tests.support import eventually

pytestmark = [pytest.mark.vm, pytest.mark.root]

NAME, OTHER, EVIL = "api.example.com", "other.example.com", "evil.example.net"


@pytest.mark.parametrize("which", ["gateway", "interceptor"])
def test_a_gateway_that_dies(guest: Guest, which: str) -> None:
    """The namespace is shut while there is none, and everything is as it was when there is one again."""
    case = Case(guest)
    guest.network([f"allow {NAME}", f"allow GET {OTHER}/public/*"])
    assert guest.run(fetch, f"http://{NAME}/")["status"] == 200
    assert guest.run(fetch, f"https://{OTHER}/public/a")["status"] == 200
    address = guest.run(resolve, NAME)["addresses"]
    case.again()
    for pid in guest.lab.rss(GATEWAY if which == "gateway" else INTERCEPTOR):
        os.kill(pid, signal.SIGKILL)
    for _ in range(3):
        assert (
            guest.run(tcp, "93.184.216.66", 80, b"GET / HTTP/1.0\r\n\r\n", timeout=1, limit=12)["data"][9:12]
            != b"200"
        )
        assert guest.run(fetch, f"https://{OTHER}/admin", timeout=1, verify=False)["status"] in (0, 403, 503)
    assert not [one for one in case.lab.arrived(case.mark) if one.method]
    eventually(lambda: guest.run(fetch, f"http://{NAME}/", timeout=3)["status"] == 200, 30)
    eventually(lambda: guest.run(fetch, f"https://{OTHER}/public/a", timeout=3)["status"] == 200, 30)
    assert guest.run(resolve, NAME)["addresses"] == address
    assert guest.run(fetch, f"http://{EVIL}/")["status"] in (0, 403)
