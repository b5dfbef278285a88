"""The way to TCP ports inside sandboxes: HTTP, WebSocket and raw tunnels over the agent's `connect`.

`door` takes requests off the application; `address` and `heads` decide and are pure; `exchange` is one HTTP
request, `upstream` its connections; `websocket` and `tunnel` are what their names say.
"""
