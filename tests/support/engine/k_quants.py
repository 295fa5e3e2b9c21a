"""Rounds matrices to ggml's types Q4_K and Q6_K, which its Python library only restores.

Not as llama.cpp does, which searches for the best scales: a reader restores what a file holds, whoever wrote it.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

K_TYPES = ("Q4_K", "Q6_K")
_BLOCK = 256


def quantized_k(values: Floats, type_name: str) -> Bytes:
    """Bytes of rows of whole blocks, `[rows, bytes]`."""
    blocks = values.astype(np.float32).reshape(values.shape[0], -1, _BLOCK)
    made = {"Q4_K": _q4_k, "Q6_K": _q6_k}[type_name](blocks)
    return made.reshape(values.shape[0], -1)


def _q6_k(blocks: Floats) -> Bytes:
    groups = blocks.reshape(*blocks.shape[:2], 16, 16)
    peaks = np.abs(groups).max(axis=3) / 31
    d = _half(peaks.max(axis=2) / 127)
    scales = np.rint(peaks / np.maximum(_wide(d), 1e-30)[:, :, None]).clip(-128, 127).astype(np.int8)
    units = (_wide(d)[:, :, None] * scales)[..., None]
    codes = np.rint(groups / np.where(units == 0, 1, units)).clip(-32, 31).astype(np.int8) + 32
    halves = codes.astype(np.uint8).reshape(*blocks.shape[:2], 2, _BLOCK // 2)
    low = halves & 15
    nibbles = low[..., :64] | low[..., 64:] << 4
    pairs = (halves >> 4).reshape(*blocks.shape[:2], 2, 4, 32)
    high = sum((pairs[..., i, :] << 2 * i for i in range(1, 4)), pairs[..., 0, :])
    parts = (
        nibbles.reshape(*blocks.shape[:2], -1),
        high.reshape(*blocks.shape[:2], -1),
        scales.view(np.uint8),
        _raw(d),
    )
    return np.concatenate(parts, axis=2)


def _q4_k(blocks: Floats) -> Bytes:
    groups = blocks.reshape(*blocks.shape[:2], 8, 32)
    lowest = np.maximum(-groups.min(axis=3), 0)
    steps = (groups.max(axis=3) + lowest) / 15
    d, dmin = _half(steps.max(axis=2) / 63), _half(lowest.max(axis=2) / 63)
    scales, minima = (
        np.rint(of / np.maximum(_wide(whole), 1e-30)[:, :, None]).clip(0, 63).astype(np.uint8)
        for of, whole in ((steps, d), (lowest, dmin))
    )
    units = (_wide(d)[:, :, None] * scales)[..., None]
    raised = groups + (_wide(dmin)[:, :, None] * minima)[..., None]
    codes = np.rint(raised / np.where(units == 0, 1, units)).clip(0, 15).astype(np.uint8)
    first, last = np.s_[..., :4], np.s_[..., 4:]
    packed = (
        scales[first] | (scales[last] >> 4) << 6,
        minima[first] | (minima[last] >> 4) << 6,
        scales[last] & 15 | (minima[last] & 15) << 4,
    )
    pairs = codes.reshape(*blocks.shape[:2], 4, 2, 32)
    nibbles = (pairs[..., 0, :] | pairs[..., 1, :] << 4).reshape(*blocks.shape[:2], -1)
    return np.concatenate((_raw(d), _raw(dmin), *packed, nibbles), axis=2)


def _half(values: Floats) -> npt.NDArray[np.float16]:
    return values.astype(np.float16)


def _wide(values: npt.NDArray[np.float16]) -> Floats:
    return values.astype(np.float32)


def _raw(values: npt.NDArray[np.float16]) -> Bytes:
    """Bytes of one number for each block, `[rows, blocks, 2]`."""
    return np.ascontiguousarray(values[..., None]).view(np.uint8)
