"""What a sandbox may reach, and what it did; secrets. Models and operations. Pure."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import ConfigDict, Field

from llm4agents.api.schema.kinds import DEFAULT_SANDBOX, NOW, Answer, Lines, Operation, Operations, Raw
from llm4agents.api.schema.sandboxes import NetworkRules


class Capture(Answer):
    """A capture of a sandbox's packets; empty: there is none."""

    bytes: int | None = None
    since: float | None = None
    bytes_max: int | None = None
    running: bool | None = None
    packets: int | None = None
    dropped: int | None = None


class Network(Answer):
    network: NetworkRules
    link: bool = Field(description="Whether there is a way out now.")
    problem: str | None = Field(description="Why it is not as it should be.")
    warnings: list[str] = Field(description="What of it is probably wider than meant.")
    capture: Capture | None


class NetworkChanged(Network):
    cut: int = Field(description="How many connections ended because of the change.")


class WhyStep(Answer):
    rule: str
    matched: str = Field(description="`yes`, `no`, `maybe`.")
    why: str


class Why(Answer):
    """Whether something is allowed, by which rule, and what was looked at."""

    allowed: bool
    rule: str
    reason: str
    via: str | None = Field(description="`splice`: relayed untouched; `intercept`: looked into.")
    steps: list[WhyStep]


class NetworkRecord(Answer):
    """A record of what a sandbox asked of the network. Which fields there are depends on its kind."""

    model_config = ConfigDict(extra="allow")

    at: float
    kind: str = Field(description="`dns`, `connection`, `request`, `packet`, `policy`, `gateway`.")
    verdict: str | None = Field(default=None, description="`allow` or `deny`.")
    rule: str | None = None
    reason: str | None = None


class NetworkLog(Answer):
    data: list[NetworkRecord]


class Secret(Answer):
    """A secret: everything but its value."""

    name: str
    version: int
    created_at: float
    updated_at: float


class SecretList(Answer):
    data: list[Secret]


class SecretRemoved(Answer):
    name: str
    removed: Literal[True]
    used_by: list[str] = Field(
        description="Sandboxes that have a binding of it: what they send there is refused now."
    )


_N = "/v1/sandboxes/{sandbox}/network"
_NETWORK: Final[dict[str, Any]] = {
    "network": {"profile": "none", "rules": ["allow api.example.com"], "rewrite": [], "credentials": []},
    "link": True,
    "problem": None,
    "warnings": [],
    "capture": None,
}
_CAPTURE: Final = {
    "bytes": 24,
    "since": NOW,
    "bytes_max": 67_108_864,
    "running": True,
    "packets": 0,
    "dropped": 0,
}
_RECORD: Final = {
    "at": NOW,
    "sandbox": DEFAULT_SANDBOX,
    "kind": "dns",
    "verdict": "allow",
    "rule": "allow api.example.com",
    "reason": "a rule allows it",
    "name": "api.example.com",
}
_SECRET: Final = {"name": "github", "version": 1, "created_at": NOW, "updated_at": NOW}

OPERATIONS: Final[Operations] = {
    ("GET", _N): Operation(
        "network_get", "Network", "What a sandbox may reach", (Network,), reach="sandbox", example=_NETWORK
    ),
    ("PUT", _N): Operation(
        "network_set",
        "Network",
        "Change what it may reach",
        (NetworkChanged,),
        words="Answers when it is obeyed: what is open and not allowed any more has been cut.",
        reach="guest",
        body={"network": ["allow api.example.com"]},
        example={**_NETWORK, "cut": 0},
    ),
    ("POST", f"{_N}/why"): Operation(
        "network_why",
        "Network",
        "Whether a URL is allowed, and why",
        (Why,),
        reach="sandbox",
        body={"url": "https://api.example.com/v1"},
        example={
            "allowed": True,
            "rule": "allow api.example.com",
            "reason": "a rule allows it",
            "via": "splice",
            "steps": [{"rule": "allow api.example.com", "matched": "yes", "why": "it is the name"}],
        },
    ),
    ("GET", f"{_N}/log"): Operation(
        "network_log",
        "Network",
        "What it asked of the network",
        (
            NetworkLog,
            Lines(
                "NetworkLine",
                (NetworkRecord,),
                "With `follow`: the newest, then those that come.",
                (_RECORD,),
            ),
        ),
        words="The newest records, oldest first.",
        reach="sandbox",
        parameters={
            "verdict": "Only these.",
            "kind": "Only of these kinds, by commas: `dns`, `connection`, `request`, `packet`, `policy`, `gateway`.",
            "after": "Only those later than this (Unix time).",
        },
        example={"data": [_RECORD]},
    ),
    ("POST", f"{_N}/capture"): Operation(
        "network_capture_start",
        "Network",
        "Capture its packets from now on",
        (Capture,),
        reach="guest",
        body={},
        example=_CAPTURE,
    ),
    ("DELETE", f"{_N}/capture"): Operation(
        "network_capture_stop",
        "Network",
        "End the capture",
        (Capture,),
        words="What was captured stays, until it is captured anew or the sandbox is forgotten.",
        reach="sandbox",
        example={**_CAPTURE, "running": False},
    ),
    ("GET", f"{_N}/capture"): Operation(
        "network_capture_get",
        "Network",
        "What was captured so far",
        (Raw("application/vnd.tcpdump.pcap", "A pcap file, whole packets."),),
        reach="sandbox",
    ),
    ("GET", "/v1/secrets"): Operation(
        "secrets_list",
        "Secrets",
        "List secrets",
        (SecretList,),
        words="Never their values.",
        example={"data": [_SECRET]},
    ),
    ("PUT", "/v1/secrets/{name}"): Operation(
        "secrets_set",
        "Secrets",
        "Make a secret, or give it a new value",
        (Secret,),
        words="A value can be written and never read. Who uses it has the new one when this answers.",
        body={"value": "the value"},
        example=_SECRET,
    ),
    ("DELETE", "/v1/secrets/{name}"): Operation(
        "secrets_remove",
        "Secrets",
        "Remove a secret",
        (SecretRemoved,),
        problems=(404,),
        example={"name": "github", "removed": True, "used_by": []},
    ),
}
