"""What a guest is told when its connection does not go through: an answer in its own protocol. Pure."""

from __future__ import annotations

from llm4agents.barrier.gateway import hello

_TEXTS = {400: "Bad Request", 403: "Forbidden", 431: "Request Header Fields Too Large", 502: "Bad Gateway",
          503: "Service Unavailable", 504: "Gateway Timeout"}  # fmt: skip


def denied(what: str, rule: str, reason: str, profile: str, host: str) -> str:
    """`reason` is policy's sentence, which names the way out of this sandbox; what follows is for the next one."""
    text = (
        f"LLM4Agents sandbox: {what} is not allowed by this sandbox's network policy.\n\n"
        f"reason: {reason}\n"
        f"rule:   {rule}\n"
    )
    if profile == "none":
        text += (
            "\nA sandbox has no network unless it is made with one:\n"
            f'  Python:       Sandbox(network="public"), or network=["allow {host}"]\n'
            f'  command line: --net public, or --net "allow {host}"\n'
            f'  while it runs: sandbox.update_network(["allow {host}"])\n'
        )
    return text


def failed(what: str, reason: str) -> str:
    return f"LLM4Agents sandbox: {what} is allowed, but no connection could be made.\n\nreason: {reason}\n"


def http(status: int, text: str, *, head_only: bool = False) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status} {_TEXTS.get(status, 'Error')}\r\n"
        "content-type: text/plain; charset=utf-8\r\n"
        f"content-length: {len(body)}\r\n"
        "cache-control: no-store\r\n"
        "x-llm4agents: barrier\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else body)


def tls(*, ours: bool) -> bytes:
    """`ours`: it is policy that denies; else the other side could not be reached."""
    return hello.alert(hello.ACCESS_DENIED if ours else hello.INTERNAL_ERROR)
