"""Captures: the packets of one sandbox in classic pcap files, by a process of their own (`__main__`).

`pcap` is the files, `captures` the server's side.
"""

from __future__ import annotations
