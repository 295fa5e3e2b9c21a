"""The clusters of the parity check."""

from tandem_bench.clusters import Setup
from tandem_bench.spine.parity import MODES, setups


def test_parity_setups_cover_every_mode_and_chunk_size():
    made = setups([16, 64])
    assert len(dict.fromkeys(made)) == len(made) == 2 * len(MODES)


def test_parity_setups_with_different_sections_are_distinct():
    assert len({Setup(mode="shm"), Setup(mode="shm"), Setup(mode="shm", engine={"eviction": "lfu"})}) == 2
