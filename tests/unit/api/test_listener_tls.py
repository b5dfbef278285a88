"""TLS of the listener: own certificates checked, the local CA and what it may sign, renewal; the SDK over it."""

from __future__ import annotations

import datetime
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from llm4agents import config, limits
from llm4agents.api.listen import tls
from llm4agents.api.listen.counting import Bounds
from llm4agents.api.listen.listener import Address
from llm4agents.api.listen.opening import Opened
from llm4agents.errors import HostSetupError, InvalidRequestError, LLM4AgentsError, SandboxNotFoundError
from llm4agents.sdk._sync.transport import Transport
from tests.support import eventually
from tests.unit.api.listening import Served, ask, closed, serving

GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
DAY = datetime.timedelta(days=1)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A listener with a local CA."""
    bounds = Bounds(handshake_s=0.5, linger_s=0.3)
    with serving(tmp_path_factory.mktemp("tls"), bounds, TLS_LOCAL="1", DOMAIN="sbx.localhost") as served:
        yield served


def pair(
    home: Path,
    names: tuple[str, ...] = ("localhost",),
    *,
    since: int = -1,
    until: int = 30,
    name: str = "own",
) -> tuple[Path, Path]:
    """A certificate of its own authority, valid from `since` until `until` (days from now)."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, names[0])])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + since * DAY)
        .not_valid_after(now + until * DAY)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(one) for one in names]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = home / f"{name}.pem", home / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    paths[1].chmod(0o600)
    return paths


def serial(sock: ssl.SSLSocket) -> str:
    return str(sock.getpeercert()["serialNumber"])  # type: ignore[index]


def test_both_protocols_over_one_port_with_the_local_ca(local: Served) -> None:
    with local.secure("http/1.1") as sock:
        assert sock.selected_alpn_protocol() == "http/1.1"
        assert ask(sock, GET)[0] == 200
    with local.secure() as sock:
        assert sock.selected_alpn_protocol() is None and ask(sock, GET)[0] == 200
    context = ssl.create_default_context(cafile=local.ca)
    for http1, version in ((False, "HTTP/2"), (True, "HTTP/1.1")):
        with httpx.Client(verify=context, http1=http1, http2=not http1, base_url=local.url) as http:
            answered = http.get("/v1/sandboxes", headers={"x-api-key": local.key})
            assert (answered.status_code, answered.http_version) == (200, version)
    with pytest.raises(ssl.SSLCertVerificationError):
        ssl.create_default_context().wrap_socket(local.connect(), server_hostname="localhost")


def test_it_is_for_the_domain_and_everything_below_and_for_nothing_else(local: Served) -> None:
    for name in ("sbx.localhost", "8000-sbx-abc.sbx.localhost", "127.0.0.1", "localhost"):
        with local.secure(name=name) as sock:
            assert ask(sock, GET)[0] == 200
    for name in ("example.org", "a.b.sbx.localhost"):
        with pytest.raises(ssl.SSLCertVerificationError):
            local.secure(name=name)


def test_the_local_ca_cannot_sign_for_others(local: Served, tmp_path: Path) -> None:
    """Whoever gets its key gets no certificate that its clients would trust for another name."""
    directory = local.ca.parent
    theirs = tls.Local(tmp_path / "stolen", tls.Names(("example.org",), ()))
    theirs.directory.mkdir()
    for name in (tls.CA, tls.CA_KEY):
        (theirs.directory / name).write_bytes((directory / name).read_bytes())
    theirs._make_leaf()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(theirs.directory / tls.LEAF, theirs.directory / tls.LEAF_KEY)
    client = ssl.create_default_context(cafile=local.ca)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname="example.org")
    other = server.wrap_bio(to_server, to_client, server_side=True)
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree"):
        for _ in range(4):
            for side in (one, other):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue


def test_keys_are_their_owners_alone(local: Served) -> None:
    directory = local.ca.parent
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, "server.pem": 0o644, "server.key": 0o600}


def test_handshakes_that_do_not_come_to_an_end(local: Served) -> None:
    before = local.figures()["listener_refusedhandshake"]
    silent, half, plain = local.connect(), local.connect(), local.connect()
    try:
        half.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        plain.sendall(GET)
        with local.secure() as sock:
            assert ask(sock, GET)[0] == 200
        assert closed(silent) and closed(half) and closed(plain)
    finally:
        for one in (silent, half, plain):
            one.close()
    eventually(lambda: local.figures()["listener_connections"] == 0, 5)
    assert local.figures()["listener_refusedhandshake"] >= before + 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_old_protocols_are_not_spoken(local: Served) -> None:
    old = ssl.create_default_context(cafile=local.ca)
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError):
        old.wrap_socket(local.connect(), server_hostname="localhost")


def test_an_own_certificate_and_a_new_one_in_its_place(tmp_path: Path) -> None:
    certificate, key = pair(tmp_path)
    with serving(tmp_path, TLS_CERT=str(certificate), TLS_KEY=str(key)) as served:
        with served.secure(ca=certificate) as sock:
            first = serial(sock)
            assert ask(sock, GET)[0] == 200
            new, new_key = pair(tmp_path, name="new")
            certificate.write_bytes(new.read_bytes())

            async def reload() -> None:
                assert served.opened.certificates is not None
                served.opened.certificates.reload()

            with pytest.raises(HostSetupError, match="is not the key"):  # half of the new pair
                served.do(reload())
            key.write_bytes(new_key.read_bytes())
            served.do(reload())
            assert ask(sock, GET)[0] == 200  # a connection that is there goes on
        with served.secure(ca=certificate) as sock:
            assert serial(sock) != first


def test_certificates_that_cannot_be_used_are_refused_at_the_start(tmp_path: Path) -> None:
    good, key = pair(tmp_path)
    expired, expired_key = pair(tmp_path, since=-9, until=-1, name="expired")
    future, future_key = pair(tmp_path, since=1, until=9, name="future")
    broken = tmp_path / "broken"
    broken.write_text("no certificate")
    open_key = tmp_path / "open.key"
    open_key.write_bytes(key.read_bytes())
    open_key.chmod(0o644)
    for certificate, private, word in (
        (tmp_path / "missing", key, "No such file"),
        (broken, key, "no certificate in PEM"),
        (good, broken, "no private key in PEM"),
        (good, expired_key, "is not the key of"),
        (expired, expired_key, "expired on"),
        (future, future_key, "not valid before"),
        (good, open_key, "everybody can read"),
    ):
        with pytest.raises(HostSetupError, match=word):
            tls.check(certificate, private, None)
    for env in (
        {"TLS_CERT": str(good)},
        {"TLS_KEY": str(key)},
        {"TLS_CERT": str(good), "TLS_KEY": str(key), "TLS_LOCAL": "1"},
        {"LISTEN": "0.0.0.0:0"},
        {"LISTEN": "192.0.2.1:0"},
        {"LISTEN": "localhost"},
        {"LISTEN": "localhost:99999"},
        {"TRUSTED_PROXIES": "example.org"},
    ):
        where = {"LISTEN": "127.0.0.1:0", "STATE": str(tmp_path / "state"), **env}
        with pytest.raises(InvalidRequestError):
            Opened(config.load({f"LLM4AGENTS_{name}": value for name, value in where.items()}))


def test_addresses() -> None:
    assert str(Address.of("[::1]:7400")) == "[::1]:7400" and Address.of("[::1]:7400").own
    assert Address.of("localhost:1").own and Address.of("127.9.9.9:1").own
    assert not Address.of("0.0.0.0:1").own and not Address.of("example.org:1").own


def test_the_local_ca_is_kept_and_its_certificate_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = tls.Names.of("10.1.2.3", "sbx.test")
    local = tls.Local(tmp_path / "tls", names)
    local.ensure()
    files = {
        name: (tmp_path / "tls" / name).read_bytes() for name in (tls.CA, tls.CA_KEY, tls.LEAF, tls.LEAF_KEY)
    }

    def changed() -> set[str]:
        return {name for name, was in files.items() if (tmp_path / "tls" / name).read_bytes() != was}

    tls.Local(tmp_path / "tls", names).ensure()
    assert not changed()
    with monkeypatch.context() as patch:  # near its end
        patch.setattr(limits, "TLS_RENEW_S", limits.TLS_LEAF_S + 1)
        tls.Local(tmp_path / "tls", names).ensure()
    assert changed() == {tls.LEAF, tls.LEAF_KEY}
    # Fewer names: the CA may sign for them.
    tls.Local(tmp_path / "tls", tls.Names.of("127.0.0.1", "sbx.test")).ensure()
    assert tls.CA not in changed()
    # Others: it may not, and there is a new one.
    tls.Local(tmp_path / "tls", tls.Names.of("127.0.0.1", "other.test")).ensure()
    assert changed() == set(files)
    (tmp_path / "tls" / tls.CA_KEY).unlink()
    (tmp_path / "tls" / tls.LEAF).unlink()
    with pytest.raises(HostSetupError, match="is gone"):
        tls.Local(tmp_path / "tls", tls.Names.of("127.0.0.1", "other.test")).ensure()
    assert not [path for path in (tmp_path / "tls").iterdir() if path.name.startswith(".")]


def test_the_sdk_trusts_what_it_is_told_to(
    local: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def client(**more: str) -> Transport:
        env = {"URL": f"https://localhost:{local.port}", "API_KEY": local.key, **more}
        return Transport(config.load({f"LLM4AGENTS_{name}": value for name, value in env.items()}))

    with client(CA_FILE=str(local.ca)) as transport:
        assert transport.json("GET", "/v1/sandboxes")["data"] == []
        path = "/v1/sandboxes/sbx_0123456789abcdefghij/processes/x/attach"
        with pytest.raises(SandboxNotFoundError):  # the gate's answer, over the same trust
            transport.websocket(path)
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with client() as transport, pytest.raises(LLM4AgentsError, match="certificate verify failed"):
        transport.json("GET", "/v1/sandboxes")
    with (
        client(CA_FILE=str(tmp_path / "none")) as transport,
        pytest.raises(InvalidRequestError, match="CA_FILE"),
    ):
        transport.json("GET", "/v1/sandboxes")
    monkeypatch.setenv("SSL_CERT_FILE", str(local.ca))
    with client() as transport:
        assert transport.json("GET", "/v1/sandboxes")["data"] == []
