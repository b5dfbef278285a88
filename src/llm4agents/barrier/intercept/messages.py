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
        patterns = getattr(self.flow.request, "exchange", None)
        patterns = patterns.patterns() if patterns is not None else None
        relayed = super().relay_messages(event)
        answer: Any = None
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
            answer = yield command
        for side in (self.client_ws, self.server_ws):
            reason = None
            if len(side.frame_buf) > limits.WEBSOCKET_FRAMES_MAX:  # (also of frames with nothing in them)
                reason = f"a message of more than {limits.WEBSOCKET_FRAMES_MAX} frames"
            elif sum(map(len, side.frame_buf)) > limits.WEBSOCKET_MESSAGE_BYTES_MAX:
                reason = f"a message of more than {limits.WEBSOCKET_MESSAGE_BYTES_MAX} bytes"
            if reason is not None:
                for ws in (self.client_ws, self.server_ws):
                    side.frame_buf = [b""]
                    yield ws.send2(wsproto.events.CloseConnection(1009, reason))
                    yield commands.CloseConnection(ws.conn)
                yield websocket.WebsocketEndHook(self.flow)
                self._handle_event = self.done
                break


def install() -> None:
    http_layers.websocket.WebsocketLayer = Messages
