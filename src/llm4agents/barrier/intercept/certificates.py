"""TLS on both sides: certificates for guests, made by the node's CA in memory, and a context that verifies origins.

The CA's key is given to this process over its control socket and is never written down by it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import certifi
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from OpenSSL import SSL, crypto

from llm4agents import limits

VALID_DAYS = 30
KEPT_S = 86_400.0
_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem",
            "/etc/ssl/ca-bundle.pem")  # fmt: skip
_PEM = re.compile(
    rb"-----BEGIN (?:TRUSTED )?CERTIFICATE-----.+?-----END (?:TRUSTED )?CERTIFICATE-----", re.DOTALL
)
_ECDHE = b"ECDHE+AESGCM:ECDHE+CHACHA20"


class Authority:
    """The node's CA. One key of our own serves all leaves of this process's life."""

    def __init__(self, certificate_pem: str, key_pem: str) -> None:
        """Raises ValueError for what is no certificate with its key."""
        self._ca = x509.load_pem_x509_certificate(certificate_pem.encode())
        key = serialization.load_pem_private_key(key_pem.encode(), None)
        if key.public_key() != self._ca.public_key():
            raise ValueError("the key is not the certificate's")
        self._ca_key: Any = key
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._pkey = crypto.PKey.from_cryptography_key(self._key)
        self._contexts: OrderedDict[str, tuple[float, SSL.Context]] = OrderedDict()

    def __repr__(self) -> str:
        return "Authority(***)"

    def context(self, host: str) -> SSL.Context:
        """The server's side of TLS for a name or an address."""
        found = self._contexts.get(host)
        now = time.monotonic()
        if found is not None and now - found[0] < KEPT_S:
            self._contexts.move_to_end(host)
            return found[1]
        context = _context(SSL.TLS_SERVER_METHOD)
        context.use_certificate(crypto.X509.from_cryptography(self._leaf(host)))
        context.use_privatekey(self._pkey)
        context.set_alpn_select_callback(_choose)
        context.set_session_cache_mode(SSL.SESS_CACHE_OFF)
        self._contexts[host] = (now, context)
        while len(self._contexts) > limits.INTERCEPT_CERTIFICATES_MAX:
            self._contexts.popitem(last=False)
        return context

    def _leaf(self, host: str) -> x509.Certificate:
        now = datetime.now(UTC)
        try:
            name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            name = x509.DNSName(host)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)] if len(host) <= 64 else [])
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._ca.subject)
            .public_key(self._key.public_key())
            .serial_number(x509.random_serial_number())
            # A guest's clock may be off, and a clone's is for a moment.
            .not_valid_before(max(now - timedelta(days=2), self._ca.not_valid_before_utc))
            .not_valid_after(min(now + timedelta(days=VALID_DAYS), self._ca.not_valid_after_utc))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([name]), critical=not len(subject))
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .add_extension(self._issuer_key(), critical=False)
            .sign(self._ca_key, hashes.SHA256())
        )

    def _issuer_key(self) -> x509.AuthorityKeyIdentifier:
        with contextlib.suppress(x509.ExtensionNotFound):
            known = self._ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier)
            return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(known.value)
        return x509.AuthorityKeyIdentifier.from_issuer_public_key(self._ca_key.public_key())


def rehearse() -> None:
    """A CA, a leaf and a handshake of nobody's: what Python imports only when it is used is in memory then, for a
    process that will soon be a user who cannot read it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rehearsal")])
    now = datetime.now(UTC)
    ca = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = ca.public_bytes(serialization.Encoding.PEM).decode()
    authority = Authority(pem, private.decode())
    guest, server = (
        SSL.Connection(_context(SSL.TLS_CLIENT_METHOD)),
        SSL.Connection(authority.context("198.51.100.1")),
    )
    guest.set_connect_state()
    server.set_accept_state()
    for _ in range(4):
        for one, other in ((guest, server), (server, guest)):
            with contextlib.suppress(SSL.WantReadError):
                one.do_handshake()
            with contextlib.suppress(SSL.WantReadError):
                other.bio_write(one.bio_read(65_536))
    for certificate in guest.get_peer_cert_chain() or []:
        certificate.to_cryptography()


def _choose(connection: SSL.Connection, offered: list[bytes]) -> Any:
    """HTTP/1.1 alone: HTTP/2's guest side would need the same strict reader (ADR 0011)."""
    return b"http/1.1" if b"http/1.1" in offered else SSL.NO_OVERLAPPING_PROTOCOLS


def _context(method: int) -> SSL.Context:
    context = SSL.Context(method)
    context.set_min_proto_version(SSL.TLS1_2_VERSION)
    context.set_cipher_list(_ECDHE)
    context.set_options(SSL.OP_NO_COMPRESSION | SSL.OP_NO_RENEGOTIATION)
    context.set_mode(SSL._lib.SSL_MODE_RELEASE_BUFFERS)
    return context


class Origins:
    """Verifies origins against the host's CA bundle. Everything is read when this is made: afterwards this process may
    be a user who cannot."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._context = _context(SSL.TLS_CLIENT_METHOD)
        self._context.set_cipher_list(_ECDHE + b":DHE+AESGCM:DHE+CHACHA20")
        self._context.set_verify(SSL.VERIFY_PEER)
        store = self._context.get_cert_store()
        assert store is not None
        self.certificates = 0
        for pem in {match[0] for source in _bundles(environ) for match in _PEM.finditer(source)}:
            with contextlib.suppress(Exception):  # one that cannot be read vouches for nobody
                store.add_cert(crypto.X509.from_cryptography(x509.load_pem_x509_certificate(pem)))
                self.certificates += 1

    def connection(self, host: str) -> SSL.Connection:
        """The client's side of TLS with `host`, which the certificate must name."""
        connection = SSL.Connection(self._context)
        parameters = SSL._lib.SSL_get0_param(connection._ssl)
        SSL._lib.X509_VERIFY_PARAM_set_hostflags(
            parameters,
            SSL._lib.X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS
            | getattr(SSL._lib, "X509_CHECK_FLAG_NEVER_CHECK_SUBJECT", 0),
        )
        try:
            packed = ipaddress.ip_address(host).packed
        except ValueError:
            name = host.encode("ascii")
            connection.set_tlsext_host_name(name)
            done = SSL._lib.X509_VERIFY_PARAM_set1_host(parameters, name, len(name))
        else:
            done = SSL._lib.X509_VERIFY_PARAM_set1_ip(parameters, packed, len(packed))
        if done != 1:
            raise ValueError(f"{host} cannot be verified")
        connection.set_alpn_protos([b"http/1.1"])
        connection.set_connect_state()
        return connection


def _bundles(environ: Mapping[str, str]) -> list[bytes]:
    """What the environment names, else the system's bundle, else certifi's."""
    found: list[bytes] = []
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if environ.get(name) and not found:
            with contextlib.suppress(OSError):
                found.append(Path(environ[name]).read_bytes())
    for directory in filter(None, environ.get("SSL_CERT_DIR", "").split(os.pathsep)):
        if Path(directory) == Path("/etc/ssl/certs") and found:
            continue  # the system's own links, which its bundle has
        for path in sorted(Path(directory).glob("*")) if Path(directory).is_dir() else []:
            with contextlib.suppress(OSError):
                if path.is_file() and path.stat().st_size < 1_048_576:
                    found.append(path.read_bytes())
    for bundle in (*_BUNDLES, certifi.where()):
        if not found:
            with contextlib.suppress(OSError):
                found.append(Path(bundle).read_bytes())
    return found
