"""What an operation of the API is, as it is described: the base of answer models, of lines, and `Operation`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """The base of what is answered. Every field is always there, unless it says otherwise by a default.

    Closed for tests; to clients answers are open: a later server may answer with more than is described.
    """

    model_config = ConfigDict(extra="forbid", strict=True, serialize_by_alias=True, validate_by_name=True)


class Page(Answer):
    """The base of lists that are told in pages."""


Schema = type[BaseModel]
Reach = Literal["server", "sandbox", "guest"]
"""How far a call goes, which says how it can fail: the server's own state; a sandbox's row; its guest."""

UnixTime = Annotated[float, Field(description="Unix time, in seconds.")]
SandboxId = Annotated[
    str,
    Field(pattern=r"^sbx_[a-z0-9]{20}$", description="The sandbox.", examples=["sbx_0123456789abcdefghij"]),
]
Base64 = Annotated[
    str, Field(description="Bytes, in base64.", json_schema_extra={"contentEncoding": "base64"})
]
Json = Any
"""Whatever JSON has: what is not ours to promise."""

NDJSON: Final = "application/x-ndjson"
BYTES: Final = "application/octet-stream"


@dataclass(frozen=True, slots=True)
class Lines:
    """An answer of NDJSON: a JSON object on each line, each one of `of`, or a problem (`ErrorLine`) as the last.

    `name` is what they are called together in the description.
    """

    name: str
    of: tuple[Schema, ...]
    words: str
    example: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Raw:
    """An answer, or a request's body, of bytes."""

    media_type: str
    words: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """Name → what it says."""
    text: bool = False


Success = Schema | Lines | Raw


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one route.

    `id`: stable, `things_verb`. `answers`: the success, or several media types of it. `problems`: statuses that it can
    answer with beyond those of its reach. `body`: an example of its JSON request, or what bytes it takes.
    """

    id: str
    tag: str
    summary: str
    answers: tuple[Success, ...]
    words: str = ""
    status: int = 200
    reach: Reach = "server"
    problems: tuple[int, ...] = ()
    body: Mapping[str, Any] | Raw | None = None
    example: Any = None
    """Of the answer."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Words for parameters, where those that all have (`document.PARAMETERS`) do not do."""
    more_parameters: tuple[Mapping[str, Any], ...] = ()
    """Parameters that the route reads by itself, as OpenAPI has them."""
    links: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    """Name → operation, and its parameters as runtime expressions: what can be done with the answer."""
    also: Mapping[int, tuple[Schema, str]] = field(default_factory=dict)
    """Other statuses with a body that is no problem."""


Operations = Mapping[tuple[str, str], Operation]
"""(method, path as the routes have it) → operation."""

DEFAULT_SANDBOX: Final = "sbx_0123456789abcdefghij"
NOW: Final = 1_790_000_000.25
