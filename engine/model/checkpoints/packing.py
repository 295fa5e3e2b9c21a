"""Integers of a few bits, packed: the orders that checkpoint formats use, and the one canonical order of nibbles."""

import torch
from torch import Tensor

_BITS_PER_BYTE = 8


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes below 16, uint8 `[rows, columns]`, two to a byte: `[rows, ceil(columns / 2)]`.

    The canonical order: columns ascend, the even one is in the low half of its byte, an odd last byte is filled
    with zero.
    """
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def unpack_nibbles(packed: Tensor, num_columns: int) -> Tensor:
    """Undo `pack_nibbles`: uint8 `[rows, num_columns]`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, :num_columns]


def canonical_codes(words: Tensor, bits: int, count: int) -> Tensor:
    """Codes of a stream of bits, as `unpack_words` takes, in the canonical form: nibbles to four bits, else bytes."""
    if bits == 4:  # the very same bits
        return words.contiguous().view(torch.uint8)[:, : -(-count // 2)].contiguous()
    codes = unpack_words(words, bits, count)
    return codes.contiguous() if bits > 4 else pack_nibbles(codes)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack int32 `[rows, words]` whose bits, from the lowest on, are one stream of `bits`-bit integers.

    Returns uint8 `[rows, count]`. Three bits straddle words: ten integers and a third fit in one. Raises ValueError
    when the words hold fewer than `count`.
    """
    num_rows, num_words = words.shape
    if num_words * 32 < count * bits:
        raise ValueError(f"{num_words} words hold fewer than {count} integers of {bits} bits")
    stream = words.contiguous().view(torch.uint8)
    mask = (1 << bits) - 1
    if _BITS_PER_BYTE % bits == 0:
        shifts = torch.arange(0, _BITS_PER_BYTE, bits, dtype=torch.uint8)
        return ((stream[:, :, None] >> shifts) & mask).flatten(1)[:, :count]
    # Eight integers are in `bits` whole bytes.
    missing = -stream.shape[1] % bits
    units = torch.nn.functional.pad(stream, (0, missing)).view(num_rows, -1, bits)
    joined = torch.zeros(units.shape[:2], dtype=torch.int64)
    for index in range(bits):
        joined |= units[:, :, index].to(torch.int64) << (_BITS_PER_BYTE * index)
    codes = torch.empty((*units.shape[:2], _BITS_PER_BYTE), dtype=torch.uint8)
    for index in range(_BITS_PER_BYTE):
        codes[:, :, index] = ((joined >> (bits * index)) & mask).to(torch.uint8)
    return codes.flatten(1)[:, :count]
