"""The sandbox as tools for agents (Model Context Protocol), over the SDK, whoever serves them.

`server` has the tools, `boxes` the sandboxes they act on, `content` what answers look like, `host_paths` the one way to
files of this machine, `inside` the SDK's way to the server that it is itself a part of.
"""
