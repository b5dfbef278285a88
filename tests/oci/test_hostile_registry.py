"""Registries that lie, break off, redirect and ask for passwords; and where this node does not go for a caller."""

from __future__ import annotations

import asyncio
import base64
import datetime
import ipaddress
import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from llm4agents import limits
from llm4agents.errors import ForbiddenError, HostSetupError, InvalidRequestError, NotFoundError
from llm4agents.images.cache import Cache
from llm4agents.images.oci import Auth, OciRootfs, Registries, rootfs
from llm4agents.images.oci.reference import Remote, parse
from llm4agents.images.oci.registry import Registry
from tests.oci.fake import Answer, Fake, Headers
from tests.oci.make import Entry, layer

TAR = layer(Entry("f", os.urandom(3_000_000)))
ME = Auth("me", "secret")


@pytest.fixture
def fake() -> Iterator[Fake]:
    found = Fake()
    yield found
    found.close()


@pytest.fixture
def other() -> Iterator[Fake]:
    found = Fake()
    yield found
    found.close()


def pull(fake: Fake, cache: Cache, auth: Auth | None = None, **more: object) -> OciRootfs:
    return asyncio.run(rootfs(f"127.0.0.1:{fake.port}/a:t", cache, auth=auth, **more))  # type: ignore[arg-type]


def test_a_connection_that_breaks_off_is_taken_up_where_it_was(fake: Fake, cache: Cache) -> None:
    digest = fake.image(TAR)
    cuts = [1_000_000, 2_000_000]

    def before(path: str, headers: Headers) -> Answer | None:
        if digest not in path or not cuts:
            return None
        begin = int(headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        end = cuts.pop(0)
        about = {"Content-Range": f"bytes {begin}-{len(TAR) - 1}/{len(TAR)}"} if begin else {}
        return 206 if begin else 200, {"Content-Length": str(len(TAR) - begin), **about}, TAR[begin:end]

    fake.before = before
    assert pull(fake, cache).bytes
    assert [headers.get("range") for headers in fake.to(digest)] == [None, "bytes=1000000-", "bytes=2000000-"]


def test_one_that_cannot_go_on_begins_again(fake: Fake, cache: Cache) -> None:
    digest = fake.image(TAR)
    left = [1]

    def before(path: str, headers: Headers) -> Answer | None:
        if digest not in path:
            return None
        if left.pop() if left else False:
            return 200, {"Content-Length": str(len(TAR))}, TAR[:2_000_000]
        return 200, {}, TAR  # and not the rest that was asked for

    fake.before = before
    assert pull(fake, cache).bytes


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, {}, TAR + b"x"), "is longer than"),
        ((200, {}, TAR[:-1] + b"x"), "is sha256:"),
        ((200, {"Content-Encoding": "gzip"}, TAR), "compresses"),
        ((403, {}, b'{"errors": [{"code": "DENIED", "message": "no\\u001b[2J"}]}'), "DENIED: no"),
    ],
)
def test_a_blob_that_is_not_what_it_is_to_be(fake: Fake, cache: Cache, answer: Answer, words: str) -> None:
    digest = fake.image(TAR)
    fake.before = lambda path, headers: answer if digest in path else None
    with pytest.raises((InvalidRequestError, HostSetupError, ForbiddenError), match=words) as error:
        pull(fake, cache)
    assert "\x1b" not in str(error.value)
    assert not list(cache.tmp.iterdir())


def test_a_busy_registry_is_asked_again_and_a_broken_one_is_not_for_ever(
    fake: Fake, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "OCI_WAIT_S_MAX", 0.01)
    fake.image(TAR)
    busy: list[int] = [429, 503]
    fake.before = lambda path, headers: (busy.pop(), {"Retry-After": "3600"}, b"") if busy else None
    assert pull(fake, cache).bytes
    fake.before = lambda path, headers: (500, {}, b"<html>oh</html>")
    with pytest.raises(HostSetupError, match="it answers 500"):
        pull(fake, cache)
    fake.before = lambda path, headers: (200, {}, b"x" * (limits.OCI_DOCUMENT_BYTES_MAX + 1))
    with pytest.raises(InvalidRequestError, match="longer than"):
        pull(fake, cache)


def test_a_redirect_elsewhere_gets_no_credentials(fake: Fake, other: Fake, cache: Cache) -> None:
    digest = fake.image(TAR)
    other.blobs[digest] = TAR
    basic = "Basic " + base64.b64encode(b"me:secret").decode()

    def before(path: str, headers: Headers) -> Answer | None:
        if headers.get("authorization") != basic:
            return 401, {"WWW-Authenticate": 'Basic realm="x"'}, b""
        if digest in path:
            return 307, {"Location": f"http://localhost:{other.port}/v2/a/blobs/{digest}?signed=1"}, b""
        return None

    fake.before = before
    assert pull(fake, cache, ME).bytes
    (headers,) = other.to(digest)
    assert "authorization" not in headers and "secret" not in json.dumps(other.asked)
    fake.before = lambda path, headers: (302, {"Location": path}, b"")
    with pytest.raises(HostSetupError, match="redirects more than"):
        pull(fake, cache)
    for bad in ("", "ftp://x/y", "http://me:secret@localhost/", "http://[::1/"):
        fake.before = lambda path, headers, bad=bad: (302, {"Location": bad}, b"")  # type: ignore[misc]
        with pytest.raises(HostSetupError, match="cannot be asked"):
            pull(fake, cache)


def test_tokens_come_from_the_server_that_the_registry_names(fake: Fake, other: Fake, cache: Cache) -> None:
    fake.image(TAR)
    given: list[str] = []

    def tokens(path: str, headers: Headers) -> Answer | None:
        if headers.get("authorization") != "Basic " + base64.b64encode(b"me:secret").decode():
            return 401, {}, b'{"errors": [{"code": "UNAUTHORIZED", "message": "who?"}]}'
        given.append(f"token{len(given)}")
        return 200, {}, json.dumps({"token": given[-1], "expires_in": 300}).encode()

    challenge = (
        f'Bearer realm="http://127.0.0.1:{other.port}/token?a=b",service="here",scope="repository:a:pull"'
    )

    def before(path: str, headers: Headers) -> Answer | None:
        if given and headers.get("authorization") == f"Bearer {given[-1]}":
            return None
        return 401, {"WWW-Authenticate": challenge}, b""

    fake.before, other.before = before, tokens
    assert pull(fake, cache, ME).bytes
    assert len(given) == 1 and other.asked[0][0] == "/token?a=b&scope=repository%3Aa%3Apull&service=here"
    assert all(
        "secret" not in json.dumps(headers) and "Basic" not in json.dumps(headers)
        for _, headers in fake.asked
    )
    with pytest.raises(ForbiddenError, match="UNAUTHORIZED: who"):
        pull(fake, cache, Auth("me", "wrong"))
    other.before = lambda path, headers: (200, {}, b'{"token": "a\\nb"}')
    with pytest.raises(HostSetupError, match="gives no token"):
        pull(fake, cache, ME)
    # One that was given by hand is sent as it is.
    given.append("mine")
    other.asked.clear()
    assert pull(fake, cache, Auth(token="mine")).bytes and not other.asked


def test_what_a_caller_names_is_not_dialled_everywhere(fake: Fake, other: Fake, cache: Cache) -> None:
    """An address that the engine refuses is not connected to: neither a registry's, nor one it leads to."""

    def refuse(address: str) -> str | None:
        return "it is loopback" if ipaddress.ip_address(address).is_loopback else None

    digest = fake.image(TAR)
    strict = Registries.parse(None, "", refuse)
    with pytest.raises(InvalidRequestError, match=r"loopback.*LLM4AGENTS_REGISTRIES"):
        pull(fake, cache, registries=strict)
    assert not fake.asked
    known = Registries.parse(None, f"http://127.0.0.1:{fake.port}", refuse)
    assert pull(fake, cache, registries=known).bytes
    # What the operator has named is that registry, and not what it sends us to.
    cache.blob_path(digest.removeprefix("sha256:")).unlink()
    for entry in cache.index.glob("oci/*"):
        entry.unlink()
    fake.before = lambda path, headers: (
        (307, {"Location": f"http://127.0.0.1:{other.port}/x"}, b"") if digest in path else None
    )
    with pytest.raises(InvalidRequestError, match="loopback"):
        pull(fake, cache, registries=known)
    fake.before = lambda path, headers: (
        401,
        {"WWW-Authenticate": f'Bearer realm="http://127.0.0.1:{other.port}/token"'},
        b"",
    )
    with pytest.raises(InvalidRequestError, match="loopback"):
        pull(fake, cache, ME, registries=known)
    assert not other.asked


def test_who_is_not_there(cache: Cache, fake: Fake) -> None:
    fake.close()
    with pytest.raises(HostSetupError, match="could not be used"):
        pull(fake, cache)
    with pytest.raises(HostSetupError, match="cannot be resolved"):
        asyncio.run(rootfs("nobody.invalid/a", cache))


# -- TLS


def _certificate(home: Path) -> tuple[ssl.SSLContext, bytes]:
    """A server's context, and who vouches for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "registry")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=10))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (home / "server.pem").write_bytes(pem + key.private_bytes(serialization.Encoding.PEM, *form))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(home / "server.pem")
    return context, pem


def test_tls_is_checked_and_not_left(tmp_path: Path, other: Fake) -> None:
    context, authority = _certificate(tmp_path)
    fake = Fake(tls=context)
    try:
        fake.image(TAR)
        endpoint = f"https://localhost:{fake.port}"
        where = parse(
            f"localhost:{fake.port}/a:t", Registries.parse(None, f"localhost:{fake.port}={endpoint}")
        )
        assert isinstance(where, Remote) and not where.plain

        async def ask(certificates: bytes | None) -> bytes:
            async with Registry(where, Registries(), None, certificates) as registry:
                return (await registry.document("t"))[0]

        with pytest.raises(HostSetupError, match="CERTIFICATE_VERIFY"):
            asyncio.run(ask(None))
        assert asyncio.run(ask(authority)) == fake.tags["t"][1]
        fake.before = lambda path, headers: (307, {"Location": f"http://127.0.0.1:{other.port}/x"}, b"")
        with pytest.raises(HostSetupError, match="no TLS"):
            asyncio.run(ask(authority))
        realm = f'Bearer realm="http://127.0.0.1:{other.port}/token"'
        fake.before = lambda path, headers: (401, {"WWW-Authenticate": realm}, b"")
        with pytest.raises(HostSetupError, match="without TLS"):
            asyncio.run(ask(authority))
        assert not other.asked
    finally:
        fake.close()


def test_nothing_of_that_name(fake: Fake, cache: Cache) -> None:
    with pytest.raises(NotFoundError, match=r"127\.0\.0\.1:\d+/a:t: UNKNOWN: not here"):
        pull(fake, cache)
