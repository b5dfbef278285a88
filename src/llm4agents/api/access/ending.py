"""What is under way when its key stops being one: to the application its client has gone.

A terminal, a tunnel or a stream lasts as long as it likes, so asking for the key once, at its beginning, would leave a
revoked one a shell. An answer that is being given is still sent: also a key's own revocation has one.
"""

from __future__ import annotations

from starlette.types import Message, Receive, Scope, Send

from llm4agents.engine.keys import Held

POLICY_VIOLATION = 1008
_WHY = "the API key is revoked or has expired, or its project is disabled"


def until_ended(held: Held, scope: Scope, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """`receive` and `send` of a call, as they are until `held` ends; then its client has gone."""
    if scope["type"] == "http":

        async def hear() -> Message:
            message = await held.unless_ended(receive)
            return {"type": "http.disconnect"} if message is None else message

        return hear, send
    closed = False

    async def hear_socket() -> Message:
        nonlocal closed
        message = await held.unless_ended(receive)
        if message is not None:
            return message
        if not closed:
            closed = True
            await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": _WHY})
        return {"type": "websocket.disconnect", "code": POLICY_VIOLATION, "reason": _WHY}

    async def say(message: Message) -> None:
        if held.ended:
            raise OSError(_WHY)  # as a server says that the client has gone
        await send(message)

    return hear_socket, say
