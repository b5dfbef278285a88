"""Secrets sealed for the store, and opened again: AES-256-GCM under a key in a file of its own.

What a backup or a thief of the store has is sealed bytes. Not here: the rows (`store.secrets`), who may ask
(`engine.secrets`), where a value goes (the interceptor).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from llm4agents import limits
from llm4agents.barrier import keyfiles
from llm4agents.errors import HostSetupError, InvalidRequestError

Value: TypeAlias = "str | dict[str, str]"
"""Text; or, for AWS SigV4, `access_key_id`, `secret_access_key` and perhaps `session_token`."""

_FORMAT: Final = b"\x01"
_NONCE_BYTES: Final = 12
_ID_BYTES: Final = 8
_KEY_BYTES: Final = 32
_OTHER: Final = b"llm4agents sealed\0"
_WHAT: Final = "the key of the secrets"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_AWS: Final = {
    "access_key_id": "access_key_id",
    "secret_access_key": "secret_access_key",
    "session_token": "session_token",
    # As `aws sts assume-role` and `aws configure export-credentials` print them.
    "AccessKeyId": "access_key_id",
    "SecretAccessKey": "secret_access_key",
    "SessionToken": "session_token",
}
_AWS_IGNORED: Final = {"Version", "Expiration"}


def check_name(name: str) -> str:
    """`name`; InvalidRequestError for what cannot be a secret's. It is not repeated: it may be the value, misplaced."""
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            "that cannot be a secret's name",
            hint="1 to 64 of a-z, A-Z, 0-9, '.', '_' and '-', beginning with a letter or digit",
        )
    return name


def value_of(given: object) -> Value:
    """What a caller gave as a value, checked. InvalidRequestError says what is wrong and never repeats any of it."""
    if isinstance(given, str):
        if not given.strip():
            raise InvalidRequestError("a secret's value is not empty")
        if "\0" in given:
            raise InvalidRequestError("a secret's value has no NUL in it")
        try:
            size = len(given.encode())
        except UnicodeEncodeError:
            raise InvalidRequestError("a secret's value is not text that can be written as UTF-8") from None
        if size > limits.SECRET_BYTES_MAX:
            raise InvalidRequestError(f"a secret's value has at most {limits.SECRET_BYTES_MAX} bytes")
        return given
    if isinstance(given, Mapping):
        return _aws(given)
    raise InvalidRequestError(
        "a secret's value is text, or an object of AWS credentials",
        hint="the object has access_key_id and secret_access_key, and may have session_token",
    )


def _aws(given: Mapping[Any, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, part in given.items():
        if name in _AWS_IGNORED or (part is None and _AWS.get(name) == "session_token"):
            continue
        if name not in _AWS:
            raise InvalidRequestError(
                "AWS credentials have access_key_id, secret_access_key and session_token, and nothing else"
            )
        if (
            not isinstance(part, str)
            or not 1 <= len(part) <= limits.SECRET_BYTES_MAX // 4
            or not part.isascii()
            or not part.isprintable()
            or " " in part
        ):
            raise InvalidRequestError(f"{_AWS[name]} is not printable text without spaces")
        if found.setdefault(_AWS[name], part) != part:
            raise InvalidRequestError(f"{_AWS[name]} is given twice")
    for name in ("access_key_id", "secret_access_key"):
        if name not in found:
            raise InvalidRequestError(f"AWS credentials need {name}")
    return found


class CannotOpen(Exception):
    """A sealed value that this vault's key does not open: `reason` says why, in words that end a sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Vault:
    """The key is read when it is first needed and made when it is first needed to seal. Cheap to make.

    Every method raises HostSetupError for a key file that is not in order.
    """

    def __init__(self, state: Path, key_file: Path | None = None) -> None:
        """`key_file`: instead of `state/vault.key` (LLM4AGENTS_VAULT_KEY)."""
        self.path = key_file or state / "vault.key"
        self._key: bytes | None = None

    def __repr__(self) -> str:
        return f"<Vault {self.path}>"

    @property
    def lost(self) -> bool:
        """Whether there is no key (yet, or any more)."""
        return self._read() is None

    def make(self) -> None:
        """Make a key if there is none. Not done by `seal`: where values lie sealed, a missing key is a lost one."""
        if self._read() is None:
            keyfiles.make(self.path, os.urandom(_KEY_BYTES), _WHAT)  # another server's, if it was first

    def seal(self, name: str, version: int, value: Value) -> bytes:
        """The value sealed as that version of that name. Raises HostSetupError when there is no key."""
        return self._seal(json.dumps(value, ensure_ascii=False).encode(), _associated(name, version))

    def open(self, name: str, version: int, sealed: bytes) -> Value:
        """The value again. Raises CannotOpen: no key, another key, another name or version, or changed bytes."""
        return value_of(json.loads(self._open(sealed, _associated(name, version))))

    def seal_bytes(self, what: str, body: bytes) -> bytes:
        """What is no secret of a project's and lies in the store, sealed as `what`. Raises as `seal`."""
        return self._seal(body, _OTHER + what.encode())

    def open_bytes(self, what: str, sealed: bytes) -> bytes:
        """The bytes again. Raises as `open`."""
        return self._open(sealed, _OTHER + what.encode())

    def _seal(self, body: bytes, associated: bytes) -> bytes:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = self._read()
        if key is None:
            raise HostSetupError(f"{_WHAT} {self.path} is gone", hint="put it back")
        nonce = os.urandom(_NONCE_BYTES)
        return _FORMAT + _id(key) + nonce + AESGCM(key).encrypt(nonce, body, associated)

    def _open(self, sealed: bytes, associated: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = self._read()
        if key is None:
            raise CannotOpen(f"{self.path} is gone")
        head = len(_FORMAT) + _ID_BYTES
        if sealed[:1] != _FORMAT or len(sealed) < head + _NONCE_BYTES:
            raise CannotOpen("what is stored is not what this version seals")
        if sealed[1:head] != _id(key):
            raise CannotOpen(f"{self.path} is another key than the one they were sealed with")
        nonce, body = sealed[head : head + _NONCE_BYTES], sealed[head + _NONCE_BYTES :]
        try:
            return AESGCM(key).decrypt(nonce, body, associated)
        except InvalidTag:
            raise CannotOpen("what is stored was changed") from None

    def _read(self) -> bytes | None:
        # Read anew until there is one, then kept: a key that is taken away takes effect with the next server.
        if self._key is None:
            key = keyfiles.read(self.path, _WHAT)
            if key is not None and len(key) != _KEY_BYTES:
                raise HostSetupError(
                    f"{_WHAT} {self.path} has {len(key)} bytes and not {_KEY_BYTES}",
                    hint=f"put the right file back; a new one: head -c {_KEY_BYTES} /dev/urandom",
                )
            self._key = key
        return self._key


def _associated(name: str, version: int) -> bytes:
    return b"llm4agents secret\0" + version.to_bytes(8, "big") + name.encode()


def _id(key: bytes) -> bytes:
    """Which key it is, told without telling the key."""
    return hashlib.sha256(b"llm4agents vault key id\0" + key).digest()[:_ID_BYTES]
