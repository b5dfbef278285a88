"""Secrets as the SDK tells of them. Pure; shared by both kinds of client. There is no value in any of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

from llm4agents.sdk.results import parse_time

SecretValue: TypeAlias = "str | Mapping[str, str]"
"""Text; or AWS credentials: `access_key_id`, `secret_access_key` and perhaps `session_token`."""


@dataclass(frozen=True, slots=True)
class SecretInfo:
    """A secret's name and which version of it is in force; nobody is told its value."""

    name: str
    version: int
    """1 when it was made; one more with each new value."""
    created_at: datetime | None
    updated_at: datetime | None


def info_of(body: Mapping[str, Any]) -> SecretInfo:
    return SecretInfo(
        name=str(body.get("name")),
        version=int(body.get("version") or 0),
        created_at=parse_time(body.get("created_at")),
        updated_at=parse_time(body.get("updated_at")),
    )


def plain(value: SecretValue) -> str | dict[str, str]:
    return value if isinstance(value, str) else dict(value)
