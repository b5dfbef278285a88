"""Certificates of the listener: one's own, checked before it is used, or a local CA's, made and renewed here.

The local CA is for laboratories and teams without a public name: clients are given its certificate (`llm4agents
server ca`). It can sign for this server's names alone, whoever has its key (name constraints). It is another CA than
the node's (`barrier.ca`), which guests trust.
"""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import secrets
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog

from llm4agents import limits
from llm4agents.config import Settings
from llm4agents.errors import HostSetupError, InvalidRequestError

if TYPE_CHECKING:
    from cryptography import x509

log = structlog.get_logger()
CA, CA_KEY, LEAF, LEAF_KEY = "ca.pem", "ca.key", "server.pem", "server.key"
_CA_YEARS: Final = 10
_BACKDATED: Final = datetime.timedelta(hours=1)
"""For clients whose clock is behind."""


@dataclass(frozen=True, slots=True)
class Names:
    """What a certificate is for."""

    dns: tuple[str, ...]
    addresses: tuple[str, ...]

    @classmethod
    def of(cls, listen_host: str, domain: str | None) -> Names:
        dns = ["localhost"]
        if domain and domain not in dns:
            dns[:0] = [domain, f"*.{domain}"]
        addresses = ["127.0.0.1", "::1"]
        try:
            address = ipaddress.ip_address(listen_host)
            if not address.is_unspecified and str(address) not in addresses:
                addresses.append(str(address))
        except ValueError:
            if listen_host not in dns:
                dns.append(listen_host)
        return cls(tuple(dns), tuple(addresses))


class Certificates:
    """The listener's TLS: `context` is for accepting, `reload` takes what is on disk now into it."""

    def __init__(self, settings: Settings, listen_host: str) -> None:
        """Raises InvalidRequestError for half of a pair or two ways at once, HostSetupError for what cannot be used."""
        if bool(settings.tls_cert) != bool(settings.tls_key):
            raise InvalidRequestError(
                "a certificate and its key go together", hint="--tls-cert FILE --tls-key FILE"
            )
        if settings.tls_local and settings.tls_cert:
            raise InvalidRequestError("--tls-local and --tls-cert are two ways: choose one")
        self._local = Local(settings.state / "tls", Names.of(listen_host, settings.domain))
        self._own = (settings.tls_cert, settings.tls_key) if settings.tls_cert and settings.tls_key else None
        self._domain = settings.domain
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        self.context.set_ciphers("ECDHE+AESGCM:ECDHE+CHACHA20")
        self.reload()

    @property
    def names(self) -> frozenset[str]:
        """DNS names and addresses of the certificate in use; wildcards are left out."""
        return self._names

    def alpn(self, protocols: Sequence[str]) -> None:
        self.context.set_alpn_protocols(list(protocols))

    def reload(self) -> None:
        """New connections have the certificate that is on disk now. Raises HostSetupError, and changes nothing."""
        if self._own is not None:
            certificate, key = self._own
            self._names = check(certificate, key, self._domain)
        else:
            certificate, key = self._local.ensure()
            self._names = check(certificate, key, None)
        try:
            self.context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise HostSetupError(
                f"{certificate} cannot be used: {error}", hint="it is a chain in PEM, the server's own first"
            ) from error

    async def keep(self) -> None:
        """For ever: looks whether the local CA's certificate has to be renewed."""
        while True:
            await asyncio.sleep(limits.TLS_LOOK_S)
            if self._own is None:
                try:
                    self.reload()
                except HostSetupError as error:
                    log.error("certificate_not_renewed", error=str(error))


def wanted(settings: Settings) -> bool:
    return settings.tls_local or settings.tls_cert is not None or settings.tls_key is not None


def check(certificate: Path, key: Path, domain: str | None) -> frozenset[str]:
    """The names of a certificate that can be used. Raises HostSetupError saying why it cannot."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        chain = x509.load_pem_x509_certificates(certificate.read_bytes())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no certificate in PEM"
        raise HostSetupError(f"the certificate {certificate} cannot be read: {why}") from error
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), password=None)
    except TypeError as error:
        raise HostSetupError(
            f"the key {key} is encrypted", hint=f"openssl pkey -in {key} -out plain.key, mode 0600"
        ) from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is no private key in PEM"
        raise HostSetupError(f"the key {key} cannot be read: {why}") from error
    if key.stat().st_mode & 0o007:
        raise HostSetupError(f"everybody can read the key {key}", hint=f"chmod 600 {key}")
    first, now = chain[0], datetime.datetime.now(datetime.UTC)
    if first.public_key() != private.public_key():
        raise HostSetupError(
            f"{key} is not the key of {certificate}",
            hint="the server's own certificate comes first in the file",
        )
    if first.not_valid_after_utc < now:
        raise HostSetupError(
            f"the certificate {certificate} expired on {first.not_valid_after_utc:%Y-%m-%d}", hint="renew it"
        )
    if first.not_valid_before_utc > now:
        raise HostSetupError(
            f"the certificate {certificate} is not valid before {first.not_valid_before_utc:%Y-%m-%d %H:%M}",
            hint="is this host's clock right?",
        )
    dns, addresses = _names_of(first)
    if domain and f"*.{domain}" not in dns:
        log.warning(
            "certificate_without_wildcard",
            certificate=str(certificate),
            detail=f"it is not for *.{domain}: clients will not trust it for the ports of sandboxes",
        )
    return frozenset(name for name in (*dns, *addresses) if not name.startswith("*"))


def _names_of(certificate: x509.Certificate) -> tuple[list[str], list[str]]:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return [], []
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    return [name.lower() for name in names.get_values_for_type(x509.DNSName)], addresses


class Local:
    """A CA in a directory of its own, and the one certificate it signs."""

    def __init__(self, directory: Path, names: Names) -> None:
        self.directory, self._names = directory, names

    def ensure(self) -> tuple[Path, Path]:
        """(certificate chain, key), made or made anew where they are missing, for other names, or near their end.

        Raises HostSetupError when they cannot be written or the CA's key is gone.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            authority = self._read(CA)
            if authority is None or not self._covers(authority):
                self._make_authority(anew=authority is not None)
            leaf = self._read(LEAF)
            if leaf is None or not (self.directory / LEAF_KEY).exists() or self._stale(leaf):
                self._make_leaf()
        except OSError as error:
            raise HostSetupError(
                f"no certificate can be made in {self.directory}: {error.strerror or error}",
                hint="is it this user's, and not full?",
            ) from error
        return self.directory / LEAF, self.directory / LEAF_KEY

    def _read(self, name: str) -> x509.Certificate | None:
        from cryptography import x509

        try:
            return x509.load_pem_x509_certificate((self.directory / name).read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise HostSetupError(
                f"{self.directory / name} is no certificate",
                hint=f"put it back, or remove {self.directory}: a new CA is made, which clients then have to trust",
            ) from error

    def _covers(self, authority: x509.Certificate) -> bool:
        """Whether that CA may sign for our names, and long enough."""
        from cryptography import x509

        permitted = authority.extensions.get_extension_for_class(
            x509.NameConstraints
        ).value.permitted_subtrees
        have = {str(name.value) for name in permitted or []}
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=limits.TLS_LEAF_S)
        return {
            str(name.value) for name in self._constraints()
        } <= have and authority.not_valid_after_utc > end

    def _stale(self, leaf: x509.Certificate) -> bool:
        authority = self._read(CA)
        left = leaf.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
        dns, addresses = _names_of(leaf)
        return (
            left.total_seconds() < limits.TLS_RENEW_S
            or not {*self._names.dns, *self._names.addresses} <= {*dns, *addresses}
            or authority is None
            or leaf.issuer != authority.subject
        )

    def _constraints(self) -> list[x509.GeneralName]:
        from cryptography import x509

        dns = sorted({name.removeprefix("*.") for name in self._names.dns})
        return [
            *(x509.DNSName(name) for name in dns),
            *(x509.IPAddress(ipaddress.ip_network(address)) for address in self._names.addresses),
        ]

    def _make_authority(self, *, anew: bool) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        if anew:
            log.warning(
                "local_ca_replaced",
                directory=str(self.directory),
                detail="the names have changed or its end is near: clients have to be given the new one",
            )
        key = ec.generate_private_key(ec.SECP256R1())
        subject = _subject(f"LLM4Agents local CA {secrets.token_hex(4)}")
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = (
            _builder(subject, subject, key.public_key(), datetime.timedelta(days=365 * _CA_YEARS))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.NameConstraints(self._constraints(), None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        certificate = _signed(builder, key)
        self._put(CA_KEY, _pem_of(key), 0o600)
        self._put(CA, certificate, 0o644)

    def _make_leaf(self) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID

        authority = self._read(CA)
        try:
            signing = serialization.load_pem_private_key(
                (self.directory / CA_KEY).read_bytes(), password=None
            )
        except FileNotFoundError as error:
            raise HostSetupError(
                f"the key {self.directory / CA_KEY} is gone",
                hint=f"put it back, or remove {self.directory}: a new CA is made, which clients then have to trust",
            ) from error
        assert authority is not None and isinstance(signing, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.DNSName(name) for name in self._names.dns]
        names += [x509.IPAddress(ipaddress.ip_address(address)) for address in self._names.addresses]
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        builder = (
            _builder(
                _subject(self._names.dns[0][:64]),
                authority.subject,
                key.public_key(),
                datetime.timedelta(seconds=limits.TLS_LEAF_S),
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
            )
        )
        certificate = _signed(builder, signing)
        self._put(LEAF_KEY, _pem_of(key), 0o600)
        self._put(LEAF, certificate, 0o644)
        log.info("certificate_made", names=list(self._names.dns), days=limits.TLS_LEAF_S // 86_400)

    def _put(self, name: str, data: bytes, mode: int) -> None:
        """Whole or not at all, and readable by nobody else at any moment."""
        new = self.directory / f".{name}.{os.getpid()}-{secrets.token_hex(4)}"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            new.rename(self.directory / name)
        finally:
            new.unlink(missing_ok=True)


def _subject(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "LLM4Agents sandbox"),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: object, life: datetime.timedelta
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)  # type: ignore[arg-type]
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + life)
    )


def _signed(builder: x509.CertificateBuilder, key: object) -> bytes:
    from cryptography.hazmat.primitives import hashes, serialization

    made = builder.sign(key, hashes.SHA256())  # type: ignore[arg-type]
    return made.public_bytes(serialization.Encoding.PEM)


def _pem_of(key: object) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(  # type: ignore[attr-defined, no-any-return]
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
