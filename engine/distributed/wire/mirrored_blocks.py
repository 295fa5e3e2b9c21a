"""Blocks of one rank's part of the pool as bytes: their number and ids as little-endian int32, then their content.

The content is ordered by layer, then block: `[layer, block, layer_block_bytes]`. Numpy only.
"""

import struct

import numpy as np
from numpy.typing import NDArray

from engine.types.step_inputs import IntArray
from tandem.errors import InvariantError

Planes = NDArray[np.uint8]
"""Bytes of a rank's part of the pool, `[num_layers, num_blocks, layer_block_bytes]`."""
_COUNT = struct.Struct("<i")
_INT = np.dtype("<i4")


def encode_blocks(blocks: IntArray) -> bytes:
    """Encode block ids for `decode_blocks`."""
    return _COUNT.pack(len(blocks)) + blocks.astype(_INT).tobytes()


def decode_blocks(data: memoryview, *, num_blocks: int) -> tuple[IntArray, memoryview]:
    """Decode block ids. Returns them and the bytes that follow. Raises InvariantError for ids beyond the pool."""
    if len(data) < _COUNT.size:
        raise InvariantError("truncated list of blocks")
    (count,) = _COUNT.unpack_from(data)
    end = _COUNT.size + count * _INT.itemsize
    if count < 0 or len(data) < end:
        raise InvariantError("truncated list of blocks")
    blocks = np.frombuffer(data, dtype=_INT, count=count, offset=_COUNT.size).astype(np.int64)
    if count and not 0 <= int(blocks.min()) <= int(blocks.max()) < num_blocks:
        raise InvariantError(f"blocks beyond the pool's {num_blocks}")
    return blocks, data[end:]


def read_blocks(planes: Planes, blocks: IntArray) -> bytes:
    """Content of the blocks, `[layer, block, layer_block_bytes]`."""
    return planes[:, blocks].tobytes()


def write_blocks(planes: Planes, blocks: IntArray, data: memoryview) -> None:
    """Overwrite the blocks. Raises InvariantError unless `data` has exactly their size."""
    shape = (planes.shape[0], len(blocks), planes.shape[2])
    if len(data) != int(np.prod(shape)):
        raise InvariantError(f"{len(data)} bytes are not {len(blocks)} blocks")
    planes[:, blocks] = np.frombuffer(data, dtype=np.uint8).reshape(shape)
