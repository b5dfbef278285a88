"""MCP over HTTP, at `/mcp`: the tools of `llm4agents.tools`, for whoever has a key.

`endpoint` is the route, `conversations` says whose sandboxes a call acts on. The `mcp` package is imported when
somebody asks for it first: it takes a second and some memory.
"""
