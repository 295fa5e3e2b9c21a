"""The checksums of a chunk in host memory.

CRC-32 as in zlib detects every error burst of up to 32 bits, and is that of payload that lands in host memory. ISA-L
computes the same values many times faster; zlib is used where it is not installed. `sum32` is that of payload that
lands on a device; kv_transfer.memory.torch_pool defines it and has the device compute it.
"""

import functools
import zlib
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

SUM32_STEP = 0x9E3779B2
"""Even, so that the weights of `sum32`, 1, 1 + step, 1 + 2 step, ... are odd."""
SUM32_WORD_BYTES = 4
SUM32_MASK = 0xFFFFFFFF
_SUM32_PART_WORDS = 1 << 16
"""Words weighted at once: the weights stay in the cache."""


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


class RunningChecksum(Protocol):
    """Checksum of bytes that come piece by piece."""

    @property
    def value(self) -> int:
        """Checksum of all pieces so far."""

    def add(self, piece: memoryview) -> None: ...


class RunningCrc32:
    def __init__(self) -> None:
        self.value = 0

    def add(self, piece: memoryview) -> None:
        self.value = crc32(piece, self.value)


class RunningSum32:
    """`sum32` of pieces of any length."""

    def __init__(self) -> None:
        self._total = 0
        self._num_words = 0
        self._rest = b""
        """Bytes of the last, incomplete word."""

    @property
    def value(self) -> int:
        last = int.from_bytes(self._rest, "little") * (1 + self._num_words * SUM32_STEP)
        return (self._total + last) & SUM32_MASK

    def add(self, piece: memoryview) -> None:
        if self._rest:
            missing = SUM32_WORD_BYTES - len(self._rest)
            self._rest += bytes(piece[:missing])
            piece = piece[missing:]
            if len(self._rest) < SUM32_WORD_BYTES:
                return
            self._add_words(np.frombuffer(self._rest, "<u4"))
        whole = piece.nbytes - piece.nbytes % SUM32_WORD_BYTES
        words = np.frombuffer(piece[:whole], "<u4")
        for begin in range(0, len(words), _SUM32_PART_WORDS):
            self._add_words(words[begin : begin + _SUM32_PART_WORDS])
        self._rest = bytes(piece[whole:])

    def _add_words(self, words: npt.NDArray[np.uint32]) -> None:
        # The weight of word n + i is that of word i plus n steps.
        weighted = int(np.dot(words, _sum32_weights()[: len(words)]))
        self._total += weighted + self._num_words * SUM32_STEP * int(words.sum(dtype=np.uint64))
        self._num_words += len(words)


@functools.cache
def _sum32_weights() -> npt.NDArray[np.uint32]:
    return np.arange(_SUM32_PART_WORDS, dtype=np.uint32) * np.uint32(SUM32_STEP) + np.uint32(1)
