"""The second path out: TLS is ended here, every request is judged, credentials are put in, answers are struck clean.

`environment` is the server's (it makes the Python environment the interceptor runs in). `process` and what it
imports is the interceptor's, a process of its own; `heads`, `chunked`, `striking`, `sigv4`, `placeholders` and
`credentials` are plain functions over bytes that need nothing but the standard library.
"""
