"""Fresh randomness for a process that is a copy: after a fork, and after every clone or resume.

Standard library and numpy's legacy global generator, as far as they are imported. `secrets`, `os.urandom` and
`random.SystemRandom` ask the kernel, which the agent reseeds. Generators that code made for itself
(`numpy.random.default_rng()`, `random.Random(1)`) are its own: they go on where they were in every copy.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

BOOT_ID = "/run/llm4agents/boot-id"
"""Rewritten by the agent in post_restore, before anything is thawed."""


_MT19937_WORDS = 624
_numpy_state: int | None = None
"""Address of the key of numpy's global generator, once `prepare` has found it."""


def prepare() -> None:
    """After warm-up, in a process that will be cloned: make the first `reseed` of a clone cheap.

    `numpy.random.seed()` costs 25 ms in a clone's cold translation cache; overwriting the generator's state, which
    numpy publishes for C code (`BitGenerator.ctypes`), a fraction. Seeding here also drops a cached gaussian.
    """
    global _numpy_state
    reseed()
    numpy_random: Any = sys.modules.get("numpy.random")
    try:
        generator = numpy_random.mtrand._rand._bit_generator
        state = generator.state["state"]
        found = ctypes.string_at(generator.ctypes.state_address, 4 * _MT19937_WORDS + 4)
        words = memoryview(found).cast("I").tolist()
        # Trusted only where the layout is seen to be key and position.
        if words == [*state["key"].tolist(), state["pos"]]:
            _numpy_state = generator.ctypes.state_address
    except Exception:  # another numpy: the slow way
        _numpy_state = None


def reseed(*, fresh: bool = False) -> None:
    """Reseed everything global. Never raises: it runs in signal handlers.

    `fresh`: no code but ours has run in this process since `prepare`.
    """
    modules: dict[str, Any] = dict(sys.modules)
    try:
        entropy = os.urandom(64)
        random = modules.get("random")
        if random is not None:
            random.seed()
        numpy_random = modules.get("numpy.random")
        if fresh and _numpy_state is not None:
            ctypes.memmove(_numpy_state, os.urandom(4 * _MT19937_WORDS), 4 * _MT19937_WORDS)
            ctypes.c_int.from_address(_numpy_state + 4 * _MT19937_WORDS).value = _MT19937_WORDS
        elif numpy_random is not None:
            numpy_random.seed()
        ssl = modules.get("ssl")
        if ssl is not None:
            ssl.RAND_add(os.urandom(64), 64.0)
        tempfile = modules.get("tempfile")
        if tempfile is not None:
            tempfile._name_sequence = None
        uuid = modules.get("uuid")
        if uuid is not None:
            # libuuid caches node and clock sequence in C, out of reach: uuid1 is done in Python from now on,
            # with a random node (multicast bit set, RFC 9562) that no other copy has.
            uuid._generate_time_safe = None
            uuid._last_timestamp = None
            uuid._node = int.from_bytes(entropy[:6], "big") | (1 << 40)
    except Exception as error:
        os.write(2, f"runner: reseed: {error!r}\n".encode())


def generation() -> tuple[int, int] | None:
    """Which life of the machine this is; changes with every clone and resume. None outside a guest."""
    try:
        found = os.stat(BOOT_ID)  # noqa: PTH116 (on the hot path: no Path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
