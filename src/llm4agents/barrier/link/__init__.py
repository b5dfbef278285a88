"""A sandbox's link: a network namespace with a tap and planted sockets in it, and no way out.

`nft` is the ruleset, `build` makes a namespace, `__main__` is the process that does (as root, or a user namespace's
root), `links` is the server's side of it. Not here: who reads the planted sockets (`barrier.gateway`).
"""
