"""The clusters that sit the parity exam."""

from tandem_bench.clusters import Setup
from tandem_bench.spine.parity import MODES, setups


def test_every_mode_meets_every_chunk_size_once():
    made = setups([16, 64])
    assert len(dict.fromkeys(made)) == len(made) == 2 * len(MODES)


def test_clusters_that_differ_in_a_section_are_not_one():
    assert len({Setup(mode="shm"), Setup(mode="shm"), Setup(mode="shm", engine={"eviction": "lfu"})}) == 2
