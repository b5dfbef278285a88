"""What the description says in words: the API as a whole, parameters that many have, headers, WebSockets. Pure."""

from __future__ import annotations

from typing import Any, Final

from llm4agents import limits
from llm4agents.api.schema import problems

SUMMARY: Final = "Sandboxes for AI agents: a microVM each, created in the time a container takes."

WEBSOCKETS: Final[tuple[dict[str, Any], ...]] = (
    {
        "path": "/v1/sandboxes/{sandbox}/processes/{process}/attach",
        "summary": "Attach to a process: its output as it comes, its input, its terminal",
        "query": {
            "from": "Which byte to begin with; `now`: what comes next.",
            "stdin": "`1`: messages are its input.",
        },
        "server": [
            'Text first: {"started": {"id", "pid", "offset", "gap", "tty"}}.',
            "Binary: a byte for the channel (1 stdout, 2 stderr), the offset (8 bytes, little-endian), the output.",
            'Text last: {"exit": {"exit_code", "signal", "timed_out", "offset"}} or {"error": problem}.',
        ],
        "client": ["Binary: input.", 'Text: {"resize": [rows, cols]}, {"signal": n}, {"eof": true}.'],
    },
    {
        "path": "/v1/sandboxes/{sandbox}/ports/{port}/tcp",
        "summary": "A TCP connection to a port of the sandbox",
        "server": ["Binary: bytes as they come."],
        "client": ["Binary: bytes.", 'Text: {"eof": true}: no more of them.'],
    },
    {
        "path": "/v1/sandboxes/{sandbox}/ports/{port}/{path}",
        "summary": "WebSockets, and any HTTP request, to a server that runs in the sandbox",
        "server": ["What that server says."],
        "client": ["What it understands."],
    },
)

_SOCKETS: Final = "\n".join(f"- `{one['path']}`: {one['summary']}." for one in WEBSOCKETS)

DESCRIPTION: Final = f"""Everything that the SDK and the command line do is here.

**Keys.** `Authorization: Bearer KEY` or `X-API-KEY: KEY`. What a key may do are its scopes; each operation says which
it needs. Over the server's unix socket no key is needed.

**Problems.** What goes wrong is answered as problem details (RFC 9457, `application/problem+json`) with a `code`, which
is stable, and an `outcome`, which says whether the thing may have happened: `not_started` is safe to repeat. Codes:
{", ".join(f"`{code}`" for code in problems.CODES)}.

**Requests** are JSON, UTF-8; fields that are not known are refused. At most {limits.REQUEST_BODY_BYTES_MAX >> 20} MiB,
except files, which stream. **Answers** may have more fields in a later version.

**Streams** are `{"application/x-ndjson"}`: a JSON object on each line, told apart by `type`. What goes wrong after the
head was sent is the last line: a problem with `"type": "error"`.

**Repeating.** `Idempotency-Key` on a POST: the first answer is kept for 24 hours and given again
(`Idempotent-Replayed: true`), so a call whose answer was lost can be made again. The same key with another request is a
conflict.

**Pages.** `limit` and the cursor `after` (or `before`); `next` of the answer is the next page's, null on the last.

**Times** are Unix seconds, with a fraction, unless their name says another unit.

**Every answer** has an `X-Request-ID`: that of the request, if it had a good one. It is in the server's log and audit.

**WebSockets** (the same keys):
{_SOCKETS}

Ports of sandboxes are also served by name, as `PORT-ID.DOMAIN` (docs/howto/ports.md). MCP over HTTP is at `/mcp`
(docs/howto/mcp.md).
"""

SECURITY: Final[dict[str, Any]] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key: `l4a_…`."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-KEY", "description": "An API key: `l4a_…`."},
}

HEADERS: Final[dict[str, Any]] = {
    "XRequestID": {
        "description": "What this call is called in the server's log and audit.",
        "schema": {"type": "string"},
    },
    "RetryAfter": {
        "description": "Seconds after which it is worth trying again.",
        "schema": {"type": "string"},
    },
    "WWWAuthenticate": {"description": "`Bearer`.", "schema": {"type": "string"}},
    "Allow": {"description": "The methods that the path has.", "schema": {"type": "string"}},
}

SHARED_PARAMETERS: Final[dict[str, Any]] = {
    "IdempotencyKey": {
        "name": "Idempotency-Key",
        "in": "header",
        "required": False,
        "description": "Makes the call happen once, however often it is sent with the same key.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,255}$"},
    }
}

PARAMETERS: Final[dict[str, str]] = {
    "sandbox": "The sandbox's id.",
    "process": "The process's id.",
    "job": "The job's id.",
    "ident": "The context's id.",
    "port": "The TCP port.",
    "name": "Its name.",
    "digest": "SHA-256 of the files, as a tar.",
    "project": "Its id or name.",
    "invite": "Its id.",
    "volume": "The volume's id.",
    "limit": "How many at most.",
    "parents": "Make the directories above it.",
    "follow": "Go on telling, as lines.",
    "path": "Absolute, or taken from the working directory; `~` is the user's home.",
    "user": "As whom: a name or number of the guest; else whom the template says, or `user`.",
}

PATH_SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "sandbox": {"type": "string", "pattern": "^sbx_[a-z0-9]{20}$"},
    "volume": {"type": "string", "pattern": "^vol_[a-z0-9]{20}$"},
    "process": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
    "port": {"type": "integer", "minimum": 1, "maximum": 65_535},
    "digest": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
}
"""What the routes check by themselves."""
