"""HTTP/1.1: one request is one request, to the host its connection leads to, by the path and method policy has seen.

`plain` is port 80, `tls` is port 443 with the interceptor inside; both under rules with methods and paths, so that
every request is read. What is spliced is read at its beginning alone (the cases at the end).
"""

from __future__ import annotations

from urllib.parse import unquote

import pytest

from tests.barrier.attacks.guest import Case
from tests.barrier.attacks.kit import (
    Any,
    base64,
    fetch,
    raw_http,
    resolve,
    socket,
    tls_context,
    ws_frame,
)
from tests.barrier.smuggles import smuggled, smuggles
from tests.barrier.world import Arrival
from tests.support import eventually

pytestmark = [pytest.mark.vm, pytest.mark.root]

NAME, EVIL, OTHER = "api.example.com", "evil.example.net", "other.example.com"
ADMIN = b"GET /admin HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
HONEST = b"GET /public/a HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n"


@pytest.fixture(params=["plain", "tls"])
def secure(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "tls")


def rules(*names: str) -> list[str]:
    return [f"allow GET,POST {name}/public/*" for name in names or (NAME,)]


def ask(case: Case, raw: bytes, secure: bool, name: str = NAME, **more: Any) -> dict[str, Any]:
    """Bytes to the allowed host, and what came back until it was quiet."""
    more = {"timeout": 2, "quiet": 0.4, **more}
    return dict(case.guest.run(raw_http, raw, host=name, port=443 if secure else 80, tls=secure, **more))


def served(case: Case, secure: bool, name: str = NAME) -> None:
    """The positive control: an honest request on a connection of its own is answered by the origin."""
    raw = HONEST.replace(NAME.encode(), name.encode())
    answer = ask(case, raw, secure, name, timeout=8, quiet=8)
    assert answer["statuses"] == [200] and b"hello from" in answer["data"], answer


def requests(case: Case) -> list[Arrival]:
    return [one for one in case.lab.arrived(case.mark) if one.method]


def denials(case: Case) -> list[dict[str, Any]]:
    """Of connections and requests, and not only of names that are looked up."""
    return [one for one in case.guest.records(case.at) if one["verdict"] == "deny" and judged(one["kind"])]


def judged(kind: str) -> bool:
    return kind in ("connection", "request")


@pytest.mark.parametrize(
    "head",
    [
        pytest.param("GET /public/a HTTP/1.1\r\nHost: evil.example.net\r\n", id="another"),
        pytest.param("GET /public/a HTTP/1.1\r\nHost: other.example.com\r\n", id="another allowed"),
        pytest.param("GET /public/a HTTP/1.1\r\nHost: api.example.com\r\nHost: evil.example.net\r\n", id="two"),
        pytest.param("GET /public/a HTTP/1.1\r\nHost: evil.example.net\r\nHost: api.example.com\r\n", id="swapped"),
        pytest.param("GET /public/a HTTP/1.1\r\nHost: api.example.com\r\n evil.example.net\r\n", id="folded"),
        pytest.param("GET /public/a HTTP/1.1\r\nHost: api.example.com, evil.example.net\r\n", id="list"),
        pytest.param("GET /public/a HTTP/1.1\r\nHost: api.example.com@evil.example.net\r\n", id="userinfo"),
        pytest.param("GET /public/a HTTP/1.1\r\nHost: evil.example.net#api.example.com\r\n", id="fragment"),
        pytest.param("GET /public/a HTTP/1.1\r\nHost: api.example.com:80@evil.example.net\r\n", id="port and userinfo"),
        pytest.param("GET /public/a HTTP/1.1\r\nHost: api.example.com.evil.example.net\r\n", id="suffix"),
        pytest.param("GET /public/a HTTP/1.1\r\nHost: 93.184.216.66\r\n", id="address"),
        pytest.param("GET /public/a HTTP/1.1\r\nHost: \r\n", id="empty"),
        pytest.param("GET /public/a HTTP/1.1\r\n", id="none"),
        pytest.param("GET /public/a HTTP/1.1\r\nHost : evil.example.net\r\nHost: api.example.com\r\n", id="blank"),
        pytest.param("GET /public/a HTTP/1.1\r\nHost:\x00evil.example.net\r\n", id="NUL"),
        pytest.param("GET /public/a HTTP/1.1\r\nX: y\rHost: evil.example.net\r\nHost: evil.example.net\r\n", id="CR"),
        pytest.param("GET http://evil.example.net/public/a HTTP/1.1\r\nHost: evil.example.net\r\n", id="absolute"),
        pytest.param("GET http://evil.example.net/public/a HTTP/1.1\r\nHost: api.example.com\r\n", id="absolute, ours"),
        pytest.param("GET http://api.example.com@evil.example.net/public/a HTTP/1.1\r\nHost: api.example.com\r\n",
                     id="absolute, userinfo"),
        pytest.param("GET https://169.254.169.254/public/a HTTP/1.1\r\nHost: api.example.com\r\n", id="to metadata"),
        pytest.param("GET @evil.example.net/public/a HTTP/1.1\r\nHost: api.example.com\r\n", id="authority form"),
        pytest.param("GET //evil.example.net/public/a HTTP/1.1\r\nHost: evil.example.net\r\n", id="scheme-relative"),
        pytest.param("GET /public/a\r\nHost: evil.example.net\r\n", id="HTTP/0.9"),
        pytest.param("GET /public/a HTTP/1.0\r\nHost: evil.example.net\r\n", id="HTTP/1.0"),
    ],
)  # fmt: skip
def test_hosts(case: Case, secure: bool, head: str) -> None:
    case.guest.network(rules(NAME, OTHER))
    answer = ask(case, head.encode("latin-1") + b"\r\n", secure)
    assert set(answer["statuses"]) <= {400, 403, 404, 421, 426, 501, 505}, answer
    assert not [one for one in requests(case) if one.address != "93.184.216.34"]
    assert not [one for one in requests(case) if (one.header("host") or NAME) != NAME], requests(case)
    case.denied(kind=judged, name=NAME)
    case.again()
    served(case, secure)
    assert [one.target for one in requests(case)] == ["/public/a"]


@pytest.mark.parametrize(
    "raw",
    [
        b"CONNECT evil.example.net:443 HTTP/1.1\r\nHost: evil.example.net:443\r\n\r\n",
        b"CONNECT evil.example.net:443 HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
        b"CONNECT api.example.com:443 HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
        b"CONNECT evil.example.net:443 HTTP/1.1\r\nHost: evil.example.net\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /public/a HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
        b"CONNECT evil.example.net:80 HTTP/1.1\r\nHost: api.example.com\r\n\r\n",
    ],
    ids=["other", "other, Host ours", "within another", "second on the connection"],
)
def test_connect(case: Case, secure: bool, raw: bytes) -> None:
    # Where nothing looks at requests, the first is still none to a proxy; what comes later is the origin's.
    spliced = [] if secure or raw.startswith(b"GET") else [[f"allow {NAME}"]]
    for policy in (rules(), *spliced):
        case.guest.network(policy)
        case.again()
        answer = ask(case, raw, secure, limit=1 << 16)
        assert set(answer["statuses"]) <= {200, 400, 403, 405, 421, 501}, answer
        assert b"Connection established" not in answer["data"]
        assert not [one for one in requests(case) if one.method == "CONNECT"], requests(case)
        case.denied(kind=judged, name=NAME)
        case.lab.settle()
        assert {one.address for one in case.lab.arrived(case.mark)} <= {"93.184.216.34"}
    case.again()
    served(case, secure)
    assert {one.address for one in case.lab.arrived(case.mark)} == {"93.184.216.34"}


@pytest.mark.parametrize(
    "method",
    ["TRACE", "TRACK", "DEBUG", "PUT", "DELETE", "get", "GET\t", "FOO", "PROPFIND", "OPTIONS", "PRI"],
)
def test_methods(case: Case, secure: bool, method: str) -> None:
    case.guest.network(rules())
    answer = ask(
        case, f"{method} /public/a HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n".encode(), secure
    )
    assert set(answer["statuses"]) <= ({200} if method == "get" else {400, 403, 405, 501, 505}), answer
    # Small letters are judged as the method they may be taken for, or as no HTTP.
    assert not [one for one in requests(case) if one.method != "get"]
    if method == "get" and secure:
        case.allowed(kind="request", name=NAME)
    else:
        case.denied(kind=judged, name=NAME)
    served(case, secure)


def test_trace_is_refused_also_where_all_methods_are_allowed(case: Case, secure: bool) -> None:
    """It gives back what was put in."""
    case.guest.network([f"allow {NAME}/*"])
    answer = ask(
        case, f"TRACE /public/a HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n".encode(), secure
    )
    assert answer["statuses"] and set(answer["statuses"]) <= {400, 403, 405, 501}, answer
    assert not requests(case)
    case.denied(kind=judged, name=NAME)
    served(case, secure)


@pytest.mark.parametrize(
    "path",
    ["/admin", "/", "/public", "/public/../admin", "/public/./../admin", "/public/%2e%2e/admin", "/public/..%2fadmin",
     "/public/%2e%2e%2fadmin", "/public/..%5cadmin", "/public/..\\admin", "/public/%252e%252e/admin",
     "/public/..;/admin", "/public/.%2e/admin", "//public/a", "/%70ublic/../admin", "/PUBLIC/a", "/public%00/../admin",
     "/public/\x01", "/public//../../admin", "/public/a/../../admin", "public/a", "*", "?/public/a",
     "/public%2fa", "/admin?/public/a",
     "/admin#/public/a", "/public/a#/../admin", "/admin;/public/", "/public/%c0%ae%c0%ae/admin",
     "/public/\xe0\x80\xae"],
)  # fmt: skip
def test_paths(case: Case, secure: bool, path: str) -> None:
    """Whatever an origin may make of it, it stays below what the rule allows, or does not arrive."""
    case.guest.network(rules())
    raw = f"GET {path} HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n".encode("latin-1")
    answer = ask(case, raw, secure)
    for one in requests(case):
        readings = {one.target, unquote(one.target), unquote(unquote(one.target))}
        for reading in readings:
            assert reading.startswith("/public/") and ".." not in reading, (answer, one)
    if not requests(case):
        case.denied(kind=judged, name=NAME)
    served(case, secure)


def at_once(raws: dict[str, bytes], name: str, secure: bool) -> dict[str, Any]:
    """Each on a connection of its own, eight at a time."""
    from concurrent.futures import ThreadPoolExecutor

    def one(raw: bytes) -> Any:
        return raw_http(raw, host=name, port=443 if secure else 80, tls=secure, timeout=1.5, quiet=0.4)

    with ThreadPoolExecutor(8) as pool:
        return dict(zip(raws, pool.map(one, raws.values()), strict=True))


@pytest.mark.parametrize("name", [NAME, "te.example.com", "cl.example.com"])
def test_smuggling(case: Case, secure: bool, name: str) -> None:
    """A second request hidden behind framing that two ends read differently. Origins that heed one header only, and
    one that follows the standard, never see it as a request, and its answer is never another's. (That they do see it
    where nothing is between: tests/barrier/test_lab.py.)"""
    case.guest.network(rules(name))
    answers = case.guest.run(at_once, smuggles(name), name, secure)
    found = smuggled([one.target for one in requests(case)])
    assert not found, [(how, answers[how]) for how in found]
    assert not [one for one in requests(case) if one.target != "/public/a"]
    # Refused at once, or with the request in it judged as the one that it is: either way it is written down.
    refused = [how for how, answer in answers.items() if set(answer["statuses"]) - {100, 200}]
    assert len(refused) >= 24, answers
    case.denied(kind="request", name=name)
    eventually(lambda: len(denials(case)) >= len(refused))
    served(case, secure, name)


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"X: a\r\n\r\nGET /admin HTTP/1.1\r\nHost: api.example.com\r\n", id="second head"),
        pytest.param(b"X: a\rX-Injected: yes\r\n", id="CR"),
        pytest.param(b"X: a\nX-Injected: yes\r\n", id="LF"),
        pytest.param(b"X: a\0\r\n", id="NUL"),
        pytest.param(b"X\r\n", id="no colon"),
        pytest.param(b": a\r\n", id="no name"),
        pytest.param(b" X-Injected: yes\r\n", id="folded first line"),
        pytest.param(b"X(: a\r\n", id="name that is none"),
        pytest.param(b"X: " + b"a" * 1_000_000 + b"\r\n", id="a megabyte"),
        pytest.param(b"X: a\r\n" * 20_000, id="twenty thousand"),
    ],
)
def test_header_injection(case: Case, secure: bool, head: bytes) -> None:
    case.guest.network(rules())
    ask(case, b"GET /public/a HTTP/1.1\r\nHost: api.example.com\r\n" + head + b"\r\n", secure)
    for one in requests(case):
        assert one.target == "/public/a"
        assert not [value for _, value in one.headers if "\r" in value or "\n" in value or "\0" in value], (
            one.headers
        )
    case.denied(kind=judged, name=NAME)
    served(case, secure)


def test_line_ends_in_targets(case: Case, secure: bool) -> None:
    case.guest.network(rules())
    for target in (
        b"/public/a%0d%0aX-Injected:%20yes",
        b"/public/a\r\nX-Injected: yes\r\n",
        b"/public/a\tHTTP/1.1",
        b"/public/a b",
    ):
        ask(
            case,
            b"GET " + target + b" HTTP/1.1\r\nHost: api.example.com\r\nConnection: close\r\n\r\n",
            secure,
            timeout=1,
        )
    for one in requests(case):
        assert not one.header("x-injected") or one.target == "/public/a", one
        assert " " not in one.target and "\t" not in one.target, one
    case.denied(kind=judged, name=NAME)
    served(case, secure)


def test_a_websocket_that_hides_requests(case: Case, secure: bool) -> None:
    """An upgrade that the origin does not take is no tunnel: what follows is judged as the requests that it is."""
    case.guest.network([f"allow GET {NAME}/ws", f"allow GET {NAME}/public/*"])
    key = base64.b64encode(bytes(16)).decode()

    def upgrade(path: str, more: str = "", version: int = 13) -> bytes:
        return (
            f"GET {path} HTTP/1.1\r\nHost: {NAME}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: {version}\r\nSec-WebSocket-Key: {key}\r\n{more}\r\n"
        ).encode()

    for raw in (
        upgrade("/public/not-ws"),
        upgrade("/public/not-ws", version=77),
        upgrade("/public/not-ws", "Content-Length: 0\r\n"),
        upgrade("/public/not-ws").replace(b"websocket", b"h2c, websocket"),
        upgrade("/public/not-ws")
        .replace(b"websocket", b"h2c")
        .replace(b"\r\n\r\n", b"\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n"),
    ):
        case.again()
        ask(case, raw + ADMIN, secure)
        assert not [one for one in requests(case) if "admin" in one.target], requests(case)
        case.denied(kind=judged, name=NAME)
    # A WebSocket that is one carries frames both ways, and bytes of a request in it are only frames.
    case.again()
    raw = upgrade("/ws") + ws_frame(b"hello") + ws_frame(ADMIN[:40]) + ws_frame(b"the last")
    got = ask(case, raw, secure, timeout=8, quiet=8, until=b"the last")
    assert got["statuses"][:1] == [101] and b"hello" in got["data"], got
    assert [one.target for one in requests(case)] == ["/ws"]


def test_redirects_are_judged_anew(case: Case, secure: bool) -> None:
    case.guest.network([f"allow GET {NAME}/*"])
    scheme = "https" if secure else "http"
    for to in (
        f"http://{EVIL}/",
        f"https://{EVIL}/",
        "http://169.254.169.254/",
        "http://2852039166/",
        f"//{EVIL}/",
    ):
        answer = case.guest.run(fetch, f"{scheme}://{NAME}/redirect?to={to}")
        location = dict(answer["headers"]).get("Location", "")
        assert answer["status"] in (302, 403), answer
        if location.startswith("http"):
            assert case.guest.run(fetch, location, verify=False)["status"] in (0, 403)
    assert {one.address for one in case.lab.arrived(case.mark)} == {"93.184.216.34"}
    case.denied(name=EVIL)
    case.denied(kind="connection", address="169.254.169.254")
    case.guest.network([f"allow GET {NAME}/*", f"allow {EVIL}"])
    assert case.guest.run(fetch, f"http://{EVIL}/")["status"] == 200


def test_denials_say_what_to_do(case: Case, secure: bool) -> None:
    case.guest.network(rules())
    answer = case.guest.run(fetch, f"{'https' if secure else 'http'}://{NAME}/admin")
    assert answer["status"] == 403 and b"allow" in answer["body"], answer
    case.denied(kind="request", path="/admin", method="GET")


def test_streams_are_not_held_back(case: Case, secure: bool) -> None:
    """The control of all this reading: server-sent events and large bodies pass as they come."""
    case.guest.network([f"allow GET {NAME}/*"])
    raw = f"GET /sse?n=5 HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n".encode()
    assert ask(case, raw, secure, timeout=8, quiet=8)["data"].count(b"data: event") == 5
    raw = f"GET /big?bytes=3000000 HTTP/1.1\r\nHost: {NAME}\r\nConnection: close\r\n\r\n".encode()
    assert len(ask(case, raw, secure, limit=1 << 23, timeout=20, quiet=20)["data"]) > 3_000_000


def second_host(address: str, secure: bool, name: str) -> list[bytes]:
    """Two requests on one connection, the second for another host; how each answer begins."""
    from http.client import HTTPException, HTTPResponse

    got = []
    with socket.create_connection((address, 443 if secure else 80), 5) as plain:
        sock = tls_context().wrap_socket(plain, server_hostname=name) if secure else plain
        for host in (name, "evil.example.net"):
            try:
                sock.sendall(f"GET /public/a HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                answer = HTTPResponse(sock)
                answer.begin()
                answer.read()
                got.append(b"HTTP/1.1 %d " % answer.status)
            except (OSError, HTTPException):
                got.append(b"")
    return got


def test_second_request_for_another_host(case: Case, secure: bool) -> None:
    case.guest.network(rules())
    address = case.guest.run(resolve, NAME)["addresses"][0]
    first, second = case.guest.run(second_host, address, secure, NAME)
    assert b" 200 " in first.split(b"\r\n")[0] and b" 200 " not in second.split(b"\r\n")[0]
    assert [one.header("host") for one in requests(case)] == [NAME]
    case.denied(kind="request", name=NAME)


def test_second_request_under_splice_goes_nowhere_else(case: Case) -> None:
    """A spliced connection leads to one origin; what is said later on it is between guest and origin (SECURITY.md)."""
    case.guest.network([f"allow {NAME}"])
    address = case.guest.run(resolve, NAME)["addresses"][0]
    first, second = case.guest.run(second_host, address, False, NAME)
    assert b" 200 " in first and b" 200 " in second, "and the origin answered both"
    assert [(one.address, one.header("host")) for one in requests(case)] == [
        ("93.184.216.34", NAME), ("93.184.216.34", EVIL)
    ]  # fmt: skip
    case.allowed(kind="connection", name=NAME)
    case.again()
    raw = b"GET /public/a HTTP/1.1\r\nHost: evil.example.net\r\n\r\n"
    assert case.guest.run(raw_http, raw, host=NAME, timeout=2)["statuses"] == [403]
    case.nothing_arrived()
    case.denied(kind="connection", name=NAME)
