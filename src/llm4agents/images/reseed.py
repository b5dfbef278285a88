"""The one piece of native code that Node's runner needs: a Node-API module that calls OpenSSL's RAND_poll. Pure.

A frozen node has seeded OpenSSL already and offers no way to seed it again, so every clone would draw the same
keys. `process.dlopen` of this file runs RAND_poll in that process: its generators take new entropy from the
kernel. It is so small that it is written down here as an ELF file, and no compiler is needed to build an image:

    void *napi_register_module_v1(void *env, void *exports) { RAND_poll(); return exports; }
"""

from __future__ import annotations

import struct

_PAGE = 0x1000
_R, _W, _X = 4, 2, 1
_LOAD, _DYNAMIC, _STACK = 1, 2, 0x6474E551
_HASH, _STRTAB, _SYMTAB, _RELA, _RELASZ, _RELAENT, _STRSZ, _SYMENT = 4, 5, 6, 7, 8, 9, 10, 11
_GLOB_DAT = 6
_GLOBAL_FUNCTION = 1 << 4 | 2
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_IMPORTED, _EXPORTED = b"RAND_poll", b"napi_register_module_v1"


def shared_object() -> bytes:
    """The module, for x86-64."""
    strings = b"\0" + _IMPORTED + b"\0" + _EXPORTED + b"\0"
    hash_at = _HEADER.size + 4 * _SEGMENT.size
    hashes = struct.pack("<6I", 1, 3, 1, 0, 2, 0)  # one bucket: symbol 1, then 2
    symbols_at = hash_at + len(hashes)
    relocation_at = symbols_at + 3 * _SYMBOL.size
    strings_at = relocation_at + 24
    code_at = (strings_at + len(strings) + 15) // 16 * 16
    tags = [
        (_HASH, hash_at),
        (_STRTAB, strings_at),
        (_SYMTAB, symbols_at),
        (_STRSZ, len(strings)),
        (_SYMENT, _SYMBOL.size),
        (_RELA, relocation_at),
        (_RELASZ, 24),
        (_RELAENT, 24),
        (0, 0),
    ]
    dynamic = b"".join(struct.pack("<QQ", *tag) for tag in tags)
    slot_at = _PAGE + len(dynamic)
    # push rsi; call [rip + slot]; pop rax; ret
    code = b"\x56\xff\x15" + struct.pack("<i", slot_at - (code_at + 7)) + b"\x58\xc3"
    symbols = (
        bytes(_SYMBOL.size)
        + _SYMBOL.pack(1, _GLOBAL_FUNCTION, 0, 0, 0, 0)
        + _SYMBOL.pack(2 + len(_IMPORTED), _GLOBAL_FUNCTION, 0, 1, code_at, len(code))
    )
    relocation = struct.pack("<QQq", slot_at, 1 << 32 | _GLOB_DAT, 0)
    read_only = code_at + len(code)
    writable = len(dynamic) + 8
    segments = (
        _SEGMENT.pack(_LOAD, _R | _X, 0, 0, 0, read_only, read_only, _PAGE)
        + _SEGMENT.pack(_LOAD, _R | _W, _PAGE, _PAGE, _PAGE, writable, writable, _PAGE)
        + _SEGMENT.pack(_DYNAMIC, _R | _W, _PAGE, _PAGE, _PAGE, len(dynamic), len(dynamic), 8)
        + _SEGMENT.pack(_STACK, _R | _W, 0, 0, 0, 0, 0, 16)
    )
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = _HEADER.pack(ident, 3, 62, 1, 0, _HEADER.size, 0, 0, _HEADER.size, _SEGMENT.size, 4, 64, 0, 0)
    body = header + segments + hashes + symbols + relocation + strings
    return (body.ljust(code_at, b"\0") + code).ljust(_PAGE, b"\0") + dynamic + bytes(8)
