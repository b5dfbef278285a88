"""TLS: what a hello says must be what was resolved, however it is cut up; and what is inside, where we look inside."""

from __future__ import annotations

import pytest

from tests.barrier.attacks.guest import Case
from tests.barrier.attacks.kit import (
    Any,
    client_hello,
    fetch,
    h2,
    h2_frame,
    h2_request,
    handshake,
    os,
    raw_http,
    records,
    resolve,
    ssl,
    subprocess,
    tcp,
    tls,
)

pytestmark = [pytest.mark.vm, pytest.mark.root]

NAME, OTHER, EVIL = "api.example.com", "other.example.com", "evil.example.net"
SPLICE = [f"allow {NAME}", f"allow {OTHER}"]
INTERCEPT = [f"allow GET,POST {NAME}/*", f"allow GET,POST {OTHER}/*"]
GET = b"GET /echo HTTP/1.1\r\nHost: api.example.com\r\n\r\n"


def address_of(case: Case, name: str = NAME) -> str:
    return str(case.guest.run(resolve, name)["addresses"][0])


@pytest.fixture(params=["splice", "intercept"])
def network(request: pytest.FixtureRequest, case: Case) -> list[str]:
    rules = SPLICE if request.param == "splice" else INTERCEPT
    case.guest.network(rules)
    return rules


def says(case: Case, hello: bytes, *, size: int = 16_384, cut: int = 0) -> str:
    """What answers a hello at the allowed name's address: "hello" is a server's."""
    raw = records(hello, size)
    pieces = [raw[at : at + cut] for at in range(0, len(raw), cut)] if cut else [raw]
    return str(case.guest.run(handshake, address_of(case), *pieces)["answer"])


@pytest.mark.parametrize(
    "sni",
    [EVIL, "example.com", "api.example.com.evil.example.net", "xapi.example.com", "*.example.com", "93.184.216.34",
     "198.18.0.1", "localhost", "", "api.example.com\0.evil.example.net", "evil.example.net\0.api.example.com",
     "api.example.com ", "api.example.com:443", "a" * 300],
)  # fmt: skip
def test_another_name_in_the_hello(case: Case, network: list[str], sni: str) -> None:
    assert says(case, client_hello(sni)) != "hello"
    case.nothing_arrived()
    case.denied(protocol="tls")
    assert says(case, client_hello("API.example.com")) == "hello"


def test_another_allowed_name_in_the_hello(case: Case, network: list[str]) -> None:
    """Each is allowed; an address of one is none of the other."""
    assert says(case, client_hello(OTHER)) != "hello"
    case.nothing_arrived()
    case.denied(protocol="tls", name=NAME)
    assert (
        case.guest.run(tls, address_of(case, OTHER), sni=OTHER, data=GET.replace(b"api", b"other"))["data"][
            9:12
        ]
        == b"200"
    )


def test_no_name_in_the_hello(case: Case, network: list[str]) -> None:
    assert says(case, client_hello(None)) != "hello"
    assert case.guest.run(tls, address_of(case), sni=None)["outcome"] != "answered"
    case.nothing_arrived()
    case.denied(protocol="tls", name=NAME)
    assert case.guest.run(tls, address_of(case), sni=NAME)["outcome"] == "answered"


def test_many_names_in_the_hello(case: Case, network: list[str]) -> None:
    twice = client_hello(NAME, extra=b"\0\0\0\x15\0\x13\0\0\x10" + EVIL.encode())
    for hello in (
        client_hello(NAME, names=(EVIL.encode(),)),
        client_hello(EVIL, names=(NAME.encode(),)),
        client_hello(NAME, names=(NAME.encode(),)),
        twice,
    ):
        assert says(case, hello) != "hello"
    case.nothing_arrived()
    case.denied(protocol="tls", name=NAME)
    assert says(case, client_hello(NAME)) == "hello"


def test_encrypted_hello(case: Case) -> None:
    """Real ECH names a front outside and the real destination inside, where nobody sees it: the front is what counts.
    GREASE looks the same around the allowed name, and passes, also where hellos are ended here."""
    for rules in (SPLICE, INTERCEPT):
        case.guest.network(rules)
        case.again()
        assert says(case, client_hello("cloudflare-ech.com", ech="outer")) != "hello"
        assert says(case, client_hello(None, ech="outer")) != "hello"
        assert says(case, client_hello(EVIL, ech="inner")) != "hello"
        case.nothing_arrived()
        case.denied(protocol="tls", name=NAME)
        # The key that real ECH needs is in HTTPS records, which are never answered.
        for kind in (65, 64):
            assert case.guest.run(resolve, NAME, kind)["answers"] == 0
        assert says(case, client_hello(NAME, ech="outer")) == "hello"


@pytest.mark.parametrize(("size", "cut"), [(1, 0), (7, 0), (16_384, 1), (16_384, 60), (3, 5), (50, 20)])
def test_hello_in_pieces(case: Case, network: list[str], size: int, cut: int) -> None:
    """Over records, over segments and over both: read as a whole, or refused, never guessed."""
    hello = client_hello(EVIL, alpn=())
    assert says(case, hello, size=size, cut=cut) != "hello"
    case.nothing_arrived()
    case.denied(protocol="tls", name=NAME)
    case.again()
    honest = says(case, client_hello(NAME, alpn=()), size=size, cut=cut)
    if size > 1:  # records of one byte are no client's
        assert honest == "hello"
        if network == SPLICE:  # else the origin is dialled for a request, and there is none
            assert "93.184.216.34" in {one.address for one in case.lab.arrived(case.mark, kind="tls")}


def test_hellos_that_are_none(case: Case, network: list[str]) -> None:
    def hellos() -> dict[str, bytes]:
        honest = client_hello("evil.example.net")
        body = honest[4:]
        return {
            "too long a record": b"\x16\x03\x01\xff\xff" + os.urandom(9_000),
            "too long a message": b"\x16\x03\x01\x00\x40\x01\xff\xff\xff" + os.urandom(60),
            "padding of 60 KB": records(client_hello("evil.example.net", padding=60_000)),
            "empty records": b"\x16\x03\x01\0\0" * 2_000,
            "empty, then a hello": b"\x16\x03\x01\0\0" * 10 + records(honest),
            "alert first": b"\x15\x03\x01\0\x02\x01\0" + records(honest),
            "change of cipher first": b"\x14\x03\x01\0\x01\x01" + records(honest),
            "data first": b"\x17\x03\x03\0\x10" + os.urandom(16) + records(honest),
            "hello of a server": records(b"\x02" + honest[1:]),
            "version 2": b"\x80\x2e\x01\0\x02\0\x15\0\0\0\x10\x01\0\x80\x03\0\x80" + os.urandom(30),
            "version 0": b"\x16\x00\x00" + records(honest)[3:],
            "short extensions": records(b"\x01\0" + (len(body) - 4).to_bytes(2, "big") + body[:-4]),
            "no end": records(honest)[:-30],
            "names that lie": records(client_hello(None, extra=b"\0\0\0\x08\0\xff\0\0\xff" + b"evil")),
            "garbage": os.urandom(3_000),
            "nothing": b"\x16",
        }

    def attack(hellos: dict[str, bytes], address: str) -> dict[str, str]:
        return {name: handshake(address, raw, timeout=1.0)["answer"] for name, raw in hellos.items()}

    found = case.guest.run(attack, case.guest.run(hellos), address_of(case))
    assert "hello" not in found.values(), found
    case.nothing_arrived()
    case.denied(kind="connection", name=NAME)
    assert says(case, client_hello(NAME)) == "hello"


def test_bytes_after_the_hello_are_judged_with_it(case: Case) -> None:
    """A second hello, or plain HTTP, behind an honest hello goes to the allowed host alone."""
    case.guest.network(SPLICE)
    honest, other = records(client_hello(NAME)), records(client_hello(EVIL))
    for tail in (other, GET, os.urandom(200)):
        # The origin itself answers, which the tail breaks the handshake with.
        assert case.guest.run(handshake, address_of(case), honest + tail)["answer"] == "hello"
    assert [one.address for one in case.lab.arrived(case.mark, kind="tls")] == ["93.184.216.34"] * 3
    case.lab.settle()
    assert {one.destination for one in case.lab.left(case.mark, "198.51.100.1")} == {"93.184.216.34"}
    case.allowed(kind="connection", protocol="tls", name=NAME)


def test_plain_bytes_on_the_port_of_tls(case: Case, network: list[str]) -> None:
    """SSH, SMTP and an own protocol on 443 and 80: no rule allows raw TCP."""
    for port in (443, 80):
        for raw in (b"SSH-2.0-OpenSSH_9.2\r\n", b"EHLO x\r\n", b"\x00\x01\x02exfiltrated", b"\x05\x01\x00"):
            answer = case.guest.run(tcp, address_of(case), port, raw, limit=10)
            assert answer["outcome"] in ("reset", "closed", "refused", "answered"), answer
            assert not answer["data"].startswith((b"lab", b"HTTP/1.1 200")), answer
    case.nothing_arrived()
    case.denied(name=NAME)
    case.guest.network([f"allow tcp {NAME}:22"])
    assert case.guest.run(tcp, address_of(case), 22, b"exfiltrated", limit=10)["data"][:10] == b"lab ready\n"


def test_host_other_than_sni(case: Case) -> None:
    """Where we look inside, a request for another host is refused (421); nothing of it reaches the origin."""
    case.guest.network(INTERCEPT)
    for host in (EVIL, OTHER, "api.example.com.evil.example.net", "169.254.169.254", "api.example.com:8443"):
        raw = f"GET /echo HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        answer = case.guest.run(raw_http, raw, tls=True, port=443, until=b"\r\n\r\n")
        assert answer["statuses"] and answer["statuses"][0] in (400, 403, 421), (host, answer)
    assert not [one for one in case.lab.arrived(case.mark) if one.method]
    case.denied(kind="request", name=NAME)
    answer = case.guest.run(raw_http, GET, tls=True, port=443, until=b"}")
    assert answer["statuses"] == [200] and b'"sni": "api.example.com"' in answer["data"]


def fields(
    authority: str, path: str = "/echo", method: str = "GET", *more: tuple[str, str]
) -> tuple[tuple[str, str], ...]:
    return ((":method", method), (":scheme", "https"), (":authority", authority), (":path", path), *more)


def test_authority_other_than_sni(case: Case) -> None:
    """HTTP/2 is not spoken where we look inside (ADR 0011): not offered, and refused from who speaks it all the same.
    (Under splice what is inside is not seen: SECURITY.md.)"""
    name = "h2.example.com"
    case.guest.network([f"allow {name}"])
    address = address_of(case, name)
    answer = case.guest.run(h2, address, name, h2_request(1, *fields(name)))
    assert answer["alpn"] == "h2" and b"hello h2.example.com" in answer["data"], answer
    case.guest.network([f"allow GET {name}/*"])
    case.again()
    for authority in (EVIL, OTHER, "169.254.169.254"):
        frames = h2_request(1, *fields(authority)) + h2_request(
            3, *fields(name, "/echo", "GET", ("host", authority))
        )
        case.again()
        refused_h2(case, case.guest.run(h2, address, name, frames, streams=2), name)
    assert case.guest.run(fetch, f"https://{name}/echo", verify=False)["status"] in (200, 502)


def refused_h2(case: Case, answer: dict[str, Any], name: str) -> None:
    """Nothing of it arrived, it was answered as what HTTP/1.1 cannot read, and the record shows it."""
    assert answer["alpn"] is None, answer
    assert not [one for one in case.lab.arrived(case.mark) if one.method]
    assert b"HTTP/1.1 400 " in answer["data"] or answer["outcome"] in ("closed", "reset"), answer
    case.denied(kind="request", name=name, rule="framing")


def test_requests_smuggled_through_a_downgrade(case: Case) -> None:
    """HTTP/2 in, HTTP/1.1 out would be where lengths that lie, and line ends in fields, make a second request: there
    is no such thing here."""
    case.guest.network([f"allow GET,POST {NAME}/public/*"])
    hidden = b"GET /admin HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
    attempts = [
        h2_request(1, *fields(NAME, "/public/a", "POST", ("content-length", "0")), body=hidden),
        h2_request(
            1,
            *fields(NAME, "/public/a", "POST", ("transfer-encoding", "chunked")),
            body=b"0\r\n\r\n" + hidden,
        ),
        h2_request(
            1, *fields(NAME, "/public/a HTTP/1.1\r\nHost: api.example.com\r\n\r\nGET /admin"), body=None
        ),
        h2_request(1, *fields(NAME, "/public/a", "GET", ("x", "a\r\n\r\n" + hidden.decode()))),
        h2_request(1, *fields(NAME, "/public/a", "GET\r\nx: y")),
        h2_request(1, *fields(NAME, "/public/a", "GET", ("x\r\ny", "z"))),
        h2_request(1, *fields(NAME, "/public/a", "CONNECT")),
        h2_frame(1, 4, 1, b"\xff" * 200),
        h2_frame(9, 0, 1, b"\0" * 16_000) * 200,
    ]
    address = address_of(case)
    for frames in attempts:
        case.again()
        refused_h2(case, case.guest.run(h2, address, NAME, frames, timeout=2), NAME)
    assert case.guest.run(fetch, f"https://{NAME}/public/a")["status"] == 200


def test_a_guest_that_removes_the_authority(case: Case) -> None:
    """It only blinds itself: its clients refuse our certificate, and those that do not look are still judged."""
    case.guest.network([f"allow GET {NAME}/public/*"])
    assert case.guest.run(fetch, f"https://{NAME}/public/a")["status"] == 200

    def swap(there: bool) -> None:
        path = "/etc/ssl/certs/ca-certificates.crt"
        if there:
            os.rename(path + ".away", path)
        else:
            os.rename(path, path + ".away")
            with open(path, "w"):
                pass

    case.guest.run(swap, False)
    try:
        found: dict[str, Any] = case.guest.run(_fresh_fetch, f"https://{NAME}/public/a")
        assert found["outcome"] == "untrusted", found
        case.again()
        assert case.guest.run(fetch, f"https://{NAME}/admin", verify=False)["status"] == 403
        assert not [one for one in case.lab.arrived(case.mark) if one.method]
        case.denied(kind="request", path="/admin")
    finally:
        case.guest.run(swap, True)
    assert case.guest.run(fetch, f"https://{NAME}/public/a")["status"] == 200


def _fresh_fetch(url: str) -> dict[str, Any]:
    """By a context that has just read the guest's store, and does not know the lab's authority."""
    import urllib.error
    import urllib.request

    context = (
        ssl.create_default_context(cafile="/etc/ssl/certs/ca-certificates.crt")
        if os.path.getsize("/etc/ssl/certs/ca-certificates.crt")
        else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    )
    try:
        with urllib.request.urlopen(url, timeout=8, context=context) as answer:
            return {"outcome": "answered", "status": answer.status}
    except urllib.error.URLError as error:
        untrusted = isinstance(error.reason, ssl.SSLCertVerificationError)
        return {"outcome": "untrusted" if untrusted else repr(error.reason)}


def test_an_upstream_that_cannot_be_verified(case: Case) -> None:
    """The interceptor vouches for origins, so it must not for one that nobody vouches for."""
    name = "untrusted.example.com"
    case.guest.network([f"allow GET {name}/*"])
    answer = case.guest.run(fetch, f"https://{name}/", verify=False)
    assert answer["status"] in (0, 502), answer
    assert not [one for one in case.lab.arrived(case.mark) if one.method]
    told = case.guest.audit(case.at, kind="request", name=name, status=502)
    assert "certificate" in told["reason"], told
    case.guest.network([f"allow {name}"])
    assert case.guest.run(fetch, f"https://{name}/", verify=True)["outcome"] == "untrusted"
    assert case.guest.run(fetch, f"https://{name}/", verify=False)["status"] == 200


def test_openssl_and_curl_see_what_policy_says(case: Case) -> None:
    """With the guest's own tools: a denial is an error at once, never silence."""
    case.guest.network(SPLICE)

    def curl(*words: str) -> tuple[int, str]:
        done = subprocess.run(["curl", "-sS", "-m", "10", *words], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    code, text = case.guest.run(curl, "--resolve", f"{EVIL}:443:93.184.216.66", f"https://{EVIL}/")
    assert code not in (0, 28), text
    code, text = case.guest.run(curl, f"http://{EVIL}/")
    assert code == 6, text
    code, text = case.guest.run(curl, "--connect-to", f"{EVIL}:443:{NAME}:443", "-k", f"https://{EVIL}/")
    assert code not in (0, 28), text
    case.nothing_arrived()
    case.denied(kind="connection", address="93.184.216.66", port=443)
    case.denied(kind="dns", name=EVIL)
    case.denied(kind="connection", name=NAME, protocol="tls")
    code, text = case.guest.run(curl, "--cacert", "/root/lab-ca.pem", f"https://{NAME}/")
    assert (code, text) == (0, "hello from 93.184.216.34:443\n")
