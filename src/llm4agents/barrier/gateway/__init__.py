"""The gateway: the one process through which a sandbox's packets leave, if policy lets them (docs/design/barrier.md).

Standard library only, no privileges, no secrets. Pure parsers of hostile bytes: `dns`, `hello`, `http1`, `packets`.
"""
