"""WebSocket messages as they are relayed: mitmproxy's layer, bounded, without memory of the past, struck clean."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import mitmproxy.proxy.layers.http as http_layers
import wsproto.events
from mitmproxy.proxy import commands, events
from mitmproxy.proxy.layers import websocket

from llm4agents import limits


class Messages(websocket.WebsocketLayer):
    def relay_messages(self, event: events.Event) -> Generator[Any, Any, None]:
        exchange = getattr(self.flow.request, "exchange", None)
        patterns = exchange.patterns() if exchange is not None else None
        relayed = super().relay_messages(event)
        answer: Any = None
        controls = 0
        while True:
            try:
                command = relayed.send(answer)
            except StopIteration:
                break
            if (
                patterns
                and isinstance(command, commands.SendData)
                and command.connection == self.context.client
            ):
                # Frames to the guest are not masked; whole messages are struck already, this is for pings and closes.
                command.data = patterns.strike(command.data)
            if isinstance(command, commands.Log):  # (mitmproxy's word that a ping or pong has come)
                controls += 1
                if controls > limits.WEBSOCKET_CONTROLS_MAX:
                    break
            elif isinstance(command, websocket.WebsocketMessageHook):
                controls = 0  # everybody else has a turn now
            answer = yield command
        held = sum(len(part) for side in (self.client_ws, self.server_ws) for part in side.frame_buf)
        room = exchange is None or exchange.hold(held)
        for side in (self.client_ws, self.server_ws):
            reason = None
            if controls > limits.WEBSOCKET_CONTROLS_MAX:
                reason = f"more than {limits.WEBSOCKET_CONTROLS_MAX} pings at once"
            elif len(side.frame_buf) > limits.WEBSOCKET_FRAMES_MAX:  # (also of frames with nothing in them)
                reason = f"a message of more than {limits.WEBSOCKET_FRAMES_MAX} frames"
            elif sum(map(len, side.frame_buf)) > limits.WEBSOCKET_MESSAGE_BYTES_MAX:
                reason = f"a message of more than {limits.WEBSOCKET_MESSAGE_BYTES_MAX} bytes"
            elif not room:
                reason = "too much of messages that are not whole yet waits for this sandbox"
            if reason is not None:
                for ws in (self.client_ws, self.server_ws):
                    ws.frame_buf = [b""]
                    yield ws.send2(wsproto.events.CloseConnection(1009, reason))
                    yield commands.CloseConnection(ws.conn)
                yield websocket.WebsocketEndHook(self.flow)
                self._handle_event = self.done
                break


class Frames(websocket.Fragmentizer):
    """As mitmproxy's, but a message that came in crumbs goes on in larger pieces."""

    def __init__(self, fragments: list[bytes], is_text: bool) -> None:
        kept = len(fragments) <= limits.WEBSOCKET_FRAMES_KEPT
        super().__init__(fragments if kept else [], is_text)


def install() -> None:
    websocket.Fragmentizer = Frames
    http_layers.websocket.WebsocketLayer = Messages
