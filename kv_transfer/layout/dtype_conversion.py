"""Converts payloads between cache dtypes, bit for bit as the engine does (`engine/kv_storage/kv_codes.py`).

Plain numpy on one thread, in batches that fit into a core's cache; bfloat16 is handled as uint16 with shifts. As in
`kv_codes.py`, values must be finite.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kv_transfer.layout.mapping import Payload, vector_bytes
from tandem.errors import TransferError
from tandem.values.kv_agreement import CONVERSIONS
from tandem.values.kv_layout import INT4_GROUP, QUANTISED_DTYPES, code_bytes, scale_bytes

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Array = npt.NDArray[Any]

BATCH_VALUES = 1 << 16
"""Values per batch: with its scratch a batch fits into a second-level cache, and numpy's cost per call is small."""

_STORED = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.float16,
    "int8": np.int8,
    "fp8_e4m3": np.uint8,
    "int4": np.uint8,
}
_LARGEST_INT8 = np.float32(127)
_LARGEST_INT4 = np.float32(15)
_LARGEST_BFLOAT16 = np.float32(3.3895313892515355e38)
_SMALLEST_PEAK = np.float32(1e-30)
_ROUND_TO_BFLOAT16 = np.uint32(0x7FFF)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vectors:
    """K and V of some layers and heads: `[layer, unit, k/v, head, token, head_dim]`, in int4 two values to a byte."""

    layers: slice
    """Layers in the model's numbering."""
    heads: slice
    values: Array
    scales: Array | None
    """Scales of int8, without the last dimension; steps and minima of int4 as bits of bfloat16, with `[num_groups, 2]`
    in its place; None for other dtypes."""

    def batch(self, layers: slice, units: slice) -> "_Vectors":
        """A part of them; `layers` and `units` are counted from the first one here."""
        return _Vectors(
            layers=slice(self.layers.start + layers.start, self.layers.start + layers.stop),
            heads=self.heads,
            values=self.values[layers, units],
            scales=None if self.scales is None else self.scales[layers, units],
        )


class Converter:
    """Converts one dtype to another. Not thread-safe: use one per thread."""

    def __init__(self, source: str, destination: str, *, head_scales: Floats | None = None) -> None:
        """`head_scales`: the model's, for fp8_e4m3: `[num_layers, 2, num_kv_heads]` of all ranks; 1 when absent.

        Raises TransferError when there is no such conversion.
        """
        if source != destination and (source, destination) not in CONVERSIONS:
            raise TransferError(f"dtype: no conversion from {source} to {destination}")
        self.source, self.destination = source, destination
        self._head_scales = head_scales
        self._to_fp8 = _fp8_of_bfloat16()
        self._of_fp8 = _values_of_fp8()
        self._scratch: dict[type[np.generic], Array] = {}

    def convert(self, payload: Payload, data: Bytes, out: Bytes) -> None:
        """Convert `data` into `out`; both are contiguous and in the order of the wire.

        Raises TransferError when either does not have the payload's size.
        """
        for name, array, dtype in (("payload", data, self.source), ("room", out, self.destination)):
            if array.nbytes != payload.num_bytes(dtype):
                raise TransferError(f"{name} of {array.nbytes} bytes, {dtype} has {payload.num_bytes(dtype)}")
        if self.source == self.destination:
            np.copyto(out, data)
        else:
            # As in torch, without a warning: a value scaled beyond float32 becomes infinite, and then the largest code.
            with np.errstate(all="ignore"):
                self._convert_all(payload, data, out)

    def _convert_all(self, payload: Payload, data: Bytes, out: Bytes) -> None:
        reads, writes = (_head_ranges(payload, a, d) for a, d in ((data, self.source), (out, self.destination)))
        for given, made in zip(reads, writes, strict=True):
            for layers, units in _batches(given.values.shape):
                self._convert(given.batch(layers, units), made.batch(layers, units))

    def _convert(self, given: _Vectors, made: _Vectors) -> None:
        if self.source in QUANTISED_DTYPES:
            self._restore(given, made)
        elif self.destination == "int4" and made.scales is not None:
            self._to_int4(given.values, made.values, made.scales)
        elif made.scales is not None:
            self._to_int8(given.values, made.values, made.scales)
        else:
            self._to_fp8_codes(given, made.values)

    def _to_int8(self, values: Array, codes: Array, scales: Floats) -> None:
        floats = self._floats(values)
        peaks = self._peaks(values if self.source == "bfloat16" else floats)
        factors = np.zeros_like(peaks)
        np.divide(_LARGEST_INT8, peaks, out=factors, where=peaks > _SMALLEST_PEAK)
        np.divide(peaks, _LARGEST_INT8, out=scales)
        products = self._room(np.float32, values.shape)
        np.multiply(floats, factors[..., None], out=products)
        # No clipping is needed: |value| * (127 / peak) exceeds 127 by two roundings at most, and rounds to 127.
        np.rint(products, out=products)
        np.copyto(codes, products, casting="unsafe")

    def _to_int4(self, values: Array, codes: Bytes, scales: Array) -> None:
        floats = self._floats(values)
        scaled = self._room(np.float32, values.shape)
        for group in range(scales.shape[-2]):
            part = slice(group * INT4_GROUP, (group + 1) * INT4_GROUP)
            lows = floats[..., part].min(-1).clip(-_LARGEST_BFLOAT16, _LARGEST_BFLOAT16)
            lows = _nearest_bfloat16(np.where(np.abs(lows) > _SMALLEST_PEAK, lows, np.float32(0)))
            steps = floats[..., part].max(-1) / _LARGEST_INT4 - lows / _LARGEST_INT4
            steps = _nearest_bfloat16(np.where(steps > _SMALLEST_PEAK, steps, np.float32(0)))
            factors = np.zeros_like(steps)
            np.divide(np.float32(1), steps, out=factors, where=steps > 0)
            np.subtract(floats[..., part], lows[..., None], out=scaled[..., part])
            np.multiply(scaled[..., part], factors[..., None], out=scaled[..., part])
            for index, words in enumerate((steps, lows)):
                np.right_shift(words.view(np.uint32), 16, out=scales[..., group, index], casting="unsafe")
        np.rint(scaled, out=scaled)
        np.clip(scaled, 0, _LARGEST_INT4, out=scaled)
        pairs = self._room(np.uint8, values.shape)
        np.copyto(pairs, scaled, casting="unsafe")
        np.left_shift(pairs[..., 1::2], 4, out=codes)
        np.bitwise_or(codes, pairs[..., ::2], out=codes)

    def _to_fp8_codes(self, given: _Vectors, codes: Array) -> None:
        values, scales = given.values, self._scales_of(given)
        if self.source == "bfloat16" and scales is None:
            indices: Array = values
        else:
            scaled = self._room(np.float32, values.shape)
            np.divide(self._floats(values), np.float32(1) if scales is None else scales, out=scaled)
            indices = self._sticky(scaled)
        np.copyto(codes, self._to_fp8.take(indices, out=self._room(np.uint8, indices.shape), mode="clip"))

    def _sticky(self, floats: Floats) -> Array:
        """The upper halves of floats, with the last bit set when any lower bit was set (rounding to odd: Boldo and
        Melquiond, 2008).

        The result rounds to the same code of e4m3: the values halfway between two codes do not have that bit.
        """
        bits = floats.view(np.uint32)
        indices = self._room(np.uint16, bits.shape)
        np.right_shift(bits, 16, out=indices, casting="unsafe")
        np.bitwise_and(bits, np.uint32(0xFFFF), out=bits)
        np.bitwise_or(indices, np.not_equal(bits, 0, out=self._room(np.bool_, bits.shape)), out=indices)
        return indices

    def _restore(self, given: _Vectors, made: _Vectors) -> None:
        floats = self._room(np.float32, made.values.shape)
        scales: Floats | None = None
        if self.source == "int4" and given.scales is not None:
            _unpack_int4(given.values, given.scales, floats)
        elif given.scales is not None:
            np.copyto(floats, given.values)
            scales = given.scales[..., None]
        else:
            self._of_fp8.take(given.values, out=floats, mode="clip")
            scales = self._scales_of(given)
        if scales is not None:
            np.multiply(floats, scales, out=floats)
        if self.destination != "bfloat16":
            np.copyto(made.values, floats, casting="same_kind")
            return
        bits = floats.view(np.uint32)
        half = np.right_shift(bits, 16, out=self._room(np.uint32, bits.shape))
        np.bitwise_and(half, np.uint32(1), out=half)
        np.add(half, _ROUND_TO_BFLOAT16, out=half)
        np.add(bits, half, out=bits)
        np.right_shift(bits, 16, out=made.values, casting="unsafe")

    def _floats(self, values: Array) -> Floats:
        """`values` as float32; in scratch memory unless they are float32 already."""
        if values.dtype == np.float32:
            return values.view(np.float32)
        floats = self._room(np.float32, values.shape)
        if self.source == "bfloat16":
            np.left_shift(values, 16, out=floats.view(np.uint32), dtype=np.uint32, casting="unsafe")
        else:
            np.copyto(floats, values)
        return floats

    def _peaks(self, values: Array) -> Floats:
        """Largest magnitude of each vector; finite floats without their signs are ordered like their bits."""
        half = values.dtype == np.uint16
        bits, sign = (values, 0x8000) if half else (values.view(np.uint32), 0x80000000)
        unsigned = np.bitwise_and(bits, sign - 1, out=self._room(np.uint16 if half else np.uint32, values.shape))
        peaks: Floats = np.left_shift(unsigned.max(-1), 16 * half, dtype=np.uint32).view(np.float32)
        return peaks

    def _room(self, dtype: type[np.generic], shape: tuple[int, ...]) -> Array:
        """Scratch memory, one array per dtype, overwritten at the next request."""
        size = math.prod(shape)
        room = self._scratch.get(dtype)
        if room is None or room.size < size:
            room = self._scratch[dtype] = np.empty(size, dtype)
        return room[:size].reshape(shape)

    def _scales_of(self, vectors: _Vectors) -> Floats | None:
        """Scales of fp8_e4m3, shaped to broadcast over the vectors; None when they are 1."""
        if self._head_scales is None:
            return None
        scales = self._head_scales[vectors.layers, :, vectors.heads]
        return scales[:, None, :, :, None, None]


def _head_ranges(payload: Payload, data: Bytes, dtype: str) -> Iterator[_Vectors]:
    """Yield views of a payload, one for each range of heads, over all layers and units."""
    layers, units = payload.num_layers, payload.num_units
    rows = data.reshape(layers, -1, copy=False)
    row_bytes = vector_bytes(dtype, payload.head_dim)
    value_bytes = code_bytes(dtype, payload.head_dim)
    begin = 0
    for first_head, num_heads in payload.head_ranges:
        shape = (layers, units, 2, num_heads, payload.unit_tokens)
        vectors = 2 * num_heads * payload.unit_tokens
        end = begin + units * vectors * row_bytes
        by_unit = rows[:, begin:end].reshape(layers, units, -1, copy=False)
        values = by_unit[..., : vectors * value_bytes].view(_STORED[dtype])
        scales = None
        if scale_bytes(dtype, payload.head_dim):
            kept, groups = (np.uint16, (-1, 2)) if dtype == "int4" else (np.float32, ())
            scales = by_unit[..., vectors * value_bytes :].view(kept).reshape(*shape, *groups, copy=False)
        yield _Vectors(
            layers=slice(payload.first_layer, payload.first_layer + layers),
            heads=slice(first_head, first_head + num_heads),
            values=values.reshape(*shape, -1, copy=False),
            scales=scales,
        )
        begin = end


def _batches(shape: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    """Yield the layers and units of each batch of vectors of this shape."""
    num_layers, num_units = shape[:2]
    unit_values = math.prod(shape[2:])
    units = min(num_units, max(1, BATCH_VALUES // unit_values))
    layers = max(1, BATCH_VALUES // (unit_values * num_units)) if units == num_units else 1
    for layer in range(0, num_layers, layers):
        for unit in range(0, num_units, units):
            yield slice(layer, min(layer + layers, num_layers)), slice(unit, min(unit + units, num_units))


def _unpack_int4(codes: Bytes, scales: Array, out: Floats) -> None:
    """Restore values: a product that is exact, then a sum rounded once."""
    np.bitwise_and(codes, 15, out=out[..., ::2], casting="unsafe", dtype=np.uint8)
    np.right_shift(codes, 4, out=out[..., 1::2], casting="unsafe", dtype=np.uint8)
    words = np.left_shift(scales, 16, dtype=np.uint32).view(np.float32)
    for group in range(scales.shape[-2]):
        part = out[..., group * INT4_GROUP : (group + 1) * INT4_GROUP]
        np.multiply(part, words[..., group, :1], out=part)
        np.add(part, words[..., group, 1:], out=part)


def _nearest_bfloat16(values: Floats) -> Floats:
    """Round finite values, ties to even."""
    bits = values.view(np.uint32)
    rounded = bits + _ROUND_TO_BFLOAT16 + (bits >> np.uint32(16) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def _values_of_fp8() -> Floats:
    """The value of each e4m3 code: sign, four bits of exponent biased by 7, three of fraction; no infinities."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent == 0, np.ldexp(fraction, -9), np.ldexp(8 + fraction, exponent - 10))
    magnitude[codes & 127 == 127] = np.nan
    values: Floats = np.where(codes < 128, magnitude, -magnitude).astype(np.float32)
    return values


def _fp8_of_bfloat16() -> Bytes:
    """The nearest e4m3 code for each bfloat16, ties to even, clipped to +-448; NaN stays NaN."""
    codes = _values_of_fp8()[:127].astype(np.float64)
    middles = (codes[:-1] + codes[1:]) / 2
    magnitudes = (np.arange(0x7F81, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    below = np.searchsorted(middles, magnitudes, side="left")
    above = np.searchsorted(middles, magnitudes, side="right")
    nearest = np.full(0x8000, 127, np.uint8)
    nearest[: magnitudes.size] = np.where(below % 2 == 0, below, above)
    table: Bytes = np.concatenate([nearest, nearest | 128])
    return table
