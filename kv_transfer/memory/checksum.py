"""The checksum of a chunk: CRC-32 as in zlib, which detects every error burst of up to 32 bits.

ISA-L computes the same values many times faster; zlib is used where it is not installed.
"""

import zlib
from collections.abc import Iterable
from typing import Protocol


class Crc32(Protocol):
    """CRC-32 of `data`, continued from `value`. Implementations release the GIL for all but tiny data."""

    def __call__(self, data: bytes | memoryview, value: int = 0, /) -> int: ...


def _fastest() -> Crc32:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    return isal_zlib.crc32


crc32 = _fastest()


def checksum_of(views: Iterable[memoryview]) -> int:
    """CRC-32 over the views' bytes, in order."""
    value = 0
    for view in views:
        value = crc32(view, value)
    return value
