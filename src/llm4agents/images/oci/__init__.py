"""Images people bring: from a registry, or a layout on disk, to a root file system that a sandbox boots from.

`rootfs` is all there is to call. Its parts: `reference` (what people write), `registry` and `layout` (where images
are), `pull` (blobs into the cache), `worker` with `unpack`, `members`, `tree` and `fitting` (layers into one tree, in a
process of its own), `images.erofs` (the tree as an image). Not here: kernel, disk, what is run in it (the engine).
"""

from llm4agents.images.oci.image import Auth, OciConfig, OciRootfs, Registries
from llm4agents.images.oci.reference import is_local
from llm4agents.images.oci.rooting import rootfs

__all__ = ["Auth", "OciConfig", "OciRootfs", "Registries", "is_local", "rootfs"]
