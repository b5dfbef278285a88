"""The node's certificate authority: what intercepted TLS is ended with. Its key never leaves the host.

Its certificate is in every template; its key goes from its file to the interceptor's memory and nowhere else.
Not here: the certificates of hosts (the interceptor makes them), trust inside a guest (`images`).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import secrets
import shutil
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from llm4agents.barrier import keyfiles
from llm4agents.errors import HostSetupError

CERTIFICATE, KEY = "certificate.pem", "key.pem"
_YEARS: Final = 10
_WHAT: Final = "the CA's key"
_ANEW: Final = (
    "a new CA is made when its directory is gone; templates are then built anew, and what was made of the old "
    "ones (also paused) has no intercepting network any more"
)


@dataclass(frozen=True, slots=True)
class Authority:
    """A node's CA. `key_pem` is a method and in no field, so that no log of an object can have it."""

    directory: Path
    certificate_pem: bytes
    """One PEM certificate."""
    digest: str = field(compare=True)
    """SHA-256 of the certificate (DER), 64 hex digits: what templates record as the CA they trust."""

    @classmethod
    def open(cls, directory: Path) -> Authority:
        """The CA in `directory` (`$STATE/ca`), made if there is none. Two servers at once make one.

        Raises HostSetupError when a part is missing, broken or readable by others.
        """
        for attempt in (True, False):
            certificate = _certificate(directory)
            if certificate is not None:
                if keyfiles.read(directory / KEY, _WHAT) is None:
                    raise HostSetupError(
                        f"{_WHAT} {directory / KEY} is gone",
                        hint=f"put it back, or remove {directory}: {_ANEW}",
                    )
                try:
                    der = ssl.PEM_cert_to_DER_cert(certificate.decode("ascii"))
                except ValueError as error:
                    raise HostSetupError(
                        f"{directory / CERTIFICATE} is no certificate",
                        hint=f"put it back, or remove {directory}",
                    ) from error
                return cls(directory, certificate, hashlib.sha256(der).hexdigest())
            if attempt:
                _make(directory)
        raise HostSetupError(f"there is a {directory} without {CERTIFICATE}", hint=f"remove it: {_ANEW}")

    def key_pem(self) -> bytes:
        """The private key (PKCS#8, PEM), for the interceptor and nobody else. Not kept: read each time.

        Raises HostSetupError: gone, readable by others, of another certificate, or the certificate has expired.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        pem = keyfiles.read(self.directory / KEY, _WHAT)
        if pem is None:
            raise HostSetupError(f"{_WHAT} {self.directory / KEY} is gone", hint=f"put it back; {_ANEW}")
        certificate = x509.load_pem_x509_certificate(self.certificate_pem)
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError):
            key = None
        if key is None or key.public_key() != certificate.public_key():
            raise HostSetupError(
                f"{self.directory / KEY} is not the key of {self.directory / CERTIFICATE}",
                hint=f"put the right one back, or remove {self.directory}: {_ANEW}",
            )
        if certificate.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
            raise HostSetupError(
                f"the node's CA expired on {certificate.not_valid_after_utc:%Y-%m-%d}",
                hint=f"remove {self.directory}: {_ANEW}",
            )
        return pem


def _certificate(directory: Path) -> bytes | None:
    try:
        return (directory / CERTIFICATE).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise HostSetupError(
            f"{directory / CERTIFICATE} cannot be read: {error.strerror}",
            hint="is its directory this user's?",
        ) from error


def _make(directory: Path) -> None:
    """Make key and certificate in `directory`, both or none; another's that is there first stays."""
    new = directory.parent / f".{directory.name}.{os.getpid()}-{secrets.token_hex(6)}"
    try:
        new.mkdir(parents=True, mode=0o700)
        certificate, key = generate()
        keyfiles.write(new / KEY, key)
        keyfiles.write(new / CERTIFICATE, certificate, 0o644)
        keyfiles.sync(new)
        with contextlib.suppress(FileExistsError, OSError):
            new.rename(directory)  # onto a directory that is not empty it fails: another's
        keyfiles.sync(directory.parent)
    except OSError as error:
        raise HostSetupError(
            f"no CA can be made in {directory}: {error.strerror}",
            hint="is its parent this user's, and not full?",
        ) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def generate() -> tuple[bytes, bytes]:
    """A new CA: certificate and private key, both PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    # Guests read it: nothing of this host is in it. Each has a subject of its own, or clients that have met two
    # would try the wrong one.
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "LLM4Agents sandbox"),
            x509.NameAttribute(NameOID.COMMON_NAME, f"LLM4Agents node CA {secrets.token_hex(4)}"),
        ]
    )
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    public = key.public_key()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=2))  # guests whose clock is behind
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS + 3))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
    return (
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
    )
