"""Encodes one step's inputs as a flat byte string, which rank 0 sends to the others, and decodes it. Numpy only.

Fourteen little-endian int32 (rows, sequences, blocks of the widest table, window groups, samples, offloads, loads,
copies, scores, pooled, slots of adapters, `num_single`, `block_size`, `num_top`), then the arrays, of the same type.
"""

import struct

import numpy as np

from engine.types.step_inputs import StepInputs, no_slots, no_tables
from tandem.errors import InvariantError

_HEADER = struct.Struct("<14i")
_INT = np.dtype("<i4")


def encode_step(inputs: StepInputs) -> bytes:
    """Encode a step's inputs."""
    num_seqs, max_blocks = inputs.tables.shape
    header = _HEADER.pack(
        len(inputs.token_ids),
        num_seqs,
        max_blocks,
        len(inputs.window_tables),
        len(inputs.sample_rows),
        len(inputs.offloads),
        len(inputs.loads),
        len(inputs.copies),
        len(inputs.scores),
        len(inputs.pooled),
        len(inputs.adapter_slots),
        inputs.num_single,
        inputs.block_size,
        inputs.num_top,
    )
    arrays = (
        inputs.token_ids,
        inputs.positions,
        inputs.slots,
        inputs.starts,
        inputs.counts,
        inputs.sample_rows,
        inputs.offloads,
        inputs.loads,
        inputs.copies,
        inputs.scores,
        inputs.pooled,
        inputs.adapter_slots,
        inputs.window_slots,
        inputs.window_tables,
        inputs.tables,
    )
    return b"".join((header, *(array.astype(_INT).tobytes() for array in arrays)))


def decode_step(data: bytes | bytearray | memoryview) -> StepInputs:
    """Decode a step's inputs into new arrays. Raises InvariantError when the sizes contradict each other."""
    if len(data) < _HEADER.size:
        raise InvariantError("truncated step inputs")
    rows, seqs, blocks, groups, samples, *pairs, adapted, num_single, block_size, num_top = _HEADER.unpack_from(data)
    num_pooled = pairs[-1]
    sizes = (
        *(rows, rows, rows, seqs, seqs, samples),
        *(2 * count for count in pairs[:-1]),
        *(3 * num_pooled, adapted, groups * rows, groups * seqs * blocks, seqs * blocks),
    )
    if (
        min(rows, seqs, blocks, groups, samples, adapted, *pairs) < 0
        or len(data) != _HEADER.size + sum(sizes) * _INT.itemsize
    ):
        raise InvariantError(f"{len(data)} bytes are not a step of {rows} rows and {seqs} sequences of {blocks} blocks")
    values = np.frombuffer(data, dtype=_INT, offset=_HEADER.size).astype(np.int64)
    parts = np.split(values, np.cumsum(sizes[:-1]))
    token_ids, positions, slots, starts, counts, sample_rows, *found, pooled, adapter_slots, window_slots = parts[:-2]
    window_tables, tables = parts[-2:]
    offloads, loads, copies, scores = (part.reshape(-1, 2) for part in found)
    return StepInputs(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        tables=tables.reshape(seqs, blocks),
        starts=starts,
        counts=counts,
        num_single=num_single,
        sample_rows=sample_rows,
        block_size=block_size,
        offloads=offloads,
        loads=loads,
        copies=copies,
        scores=scores,
        pooled=pooled.reshape(-1, 3),
        num_top=num_top,
        adapter_slots=adapter_slots,
        window_tables=window_tables.reshape(groups, seqs, blocks) if groups else no_tables(),
        window_slots=window_slots.reshape(groups, rows) if groups else no_slots(),
    )
