"""The TCP listener: what strangers can reach, so every wait has an end and every buffer a bound.

`listener` accepts and counts; `http1` and `http2` speak with a client (HTTP/1.1 and WebSocket are uvicorn's, HTTP/2
is ours over h2); `edge` is the ASGI application around the server's: hosts, sizes, times; `origin` decides what is
believed of a request's head and is pure; `tls` has the certificates, `health` says how the server is.
Not here: who calls and what he may (`api.access`). ADR 0018 says why it is built this way.
"""
