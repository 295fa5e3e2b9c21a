"""Lists of blocks survive the wire; anything else is refused."""

import numpy as np
import pytest

from engine.distributed.wire.mirrored_blocks import decode_blocks, encode_blocks, read_blocks, write_blocks
from tandem.errors import InvariantError


def planes() -> np.ndarray:
    return np.arange(3 * 10 * 8, dtype=np.uint8).reshape(3, 10, 8)


@pytest.mark.parametrize("blocks", [[], [4], [0, 3, 9]])
def test_mirrored_blocks_round_trip(blocks: list[int]) -> None:
    source, target = planes(), np.zeros((3, 10, 8), dtype=np.uint8)
    wanted = np.array(blocks, dtype=np.int64)
    found, data = decode_blocks(memoryview(encode_blocks(wanted) + read_blocks(source, wanted)), num_blocks=10)
    write_blocks(target, found, data)
    assert found.tolist() == blocks
    assert (target[:, wanted] == source[:, wanted]).all()
    assert not target[:, np.setdiff1d(np.arange(10), wanted)].any()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01\x00",
        b"\xff\xff\xff\xff",
        encode_blocks(np.array([1, 2]))[:-1],
        encode_blocks(np.array([10])),
        encode_blocks(np.array([-1])),
    ],
)
def test_mirrored_blocks_malformed_list_is_refused(data: bytes) -> None:
    with pytest.raises(InvariantError):
        decode_blocks(memoryview(data), num_blocks=10)


def test_mirrored_blocks_of_wrong_size_are_refused() -> None:
    with pytest.raises(InvariantError, match="are not 2 blocks"):
        write_blocks(planes(), np.array([1, 2]), memoryview(bytes(7)))
