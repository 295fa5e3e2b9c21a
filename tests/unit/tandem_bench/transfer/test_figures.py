"""The transfer bench's pure parts: cases, ratios, goals, options; and the check of received bytes."""

import argparse
from pathlib import Path

import numpy as np
import pytest

from tandem_bench.report import num_missed
from tandem_bench.shapes import REFERENCE
from tandem_bench.transfer import contestants, figures, options
from tandem_bench.transfer.cases import GEOMETRIES, Geometry, make_cases, pool_bytes
from tandem_bench.transfer.contestants import COPY, PLAIN, SHM, SHM_BARE, TCP, TCP_BARE
from tandem_bench.transfer.measure import draw
from tandem_bench.transfer.pools import Pools, WrongBytes
from tandem_bench.transfer.rounds import Absence, Turn, describe

SMALL = Geometry(name="small", num_layers=3, layer_block_bytes=64)


def turn(contestant: str, rate: float, round_index: int = 0, case: str = "a") -> Turn:
    return Turn(contestant=contestant, case=case, round_index=round_index, num_bytes=10**9, seconds=1 / rate)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    return parser.parse_args(arguments)


def test_transfer_reference_shape_has_49_kb_per_token() -> None:
    geometries = {geometry.name: geometry for geometry in GEOMETRIES}
    assert geometries[REFERENCE].block_bytes == 16 * 49_152
    assert geometries["1mb"].block_bytes == 1 << 20


@pytest.mark.parametrize("payload_bytes", [2 * SMALL.block_bytes, 40 * SMALL.block_bytes + 5])
def test_transfer_copies_cover_each_layer_of_each_block(payload_bytes: int) -> None:
    for case in make_cases(payload_bytes, (SMALL,)):
        shape = (SMALL.num_layers, case.pool_blocks, SMALL.layer_block_bytes)
        source = np.random.default_rng(1).integers(1, 256, shape, dtype=np.uint8)
        wanted, moved = np.zeros_like(source), np.zeros_like(source)
        wanted[:, case.targets] = source[:, case.sources]
        for here, there, length in case.copies():
            moved.reshape(-1)[there : there + length] = source.reshape(-1)[here : here + length]
        assert np.array_equal(moved, wanted)
        assert sum(length for _, _, length in case.copies()) == case.num_bytes
        assert source.nbytes <= pool_bytes(payload_bytes)


def test_transfer_adjacent_blocks_are_one_copy_per_layer() -> None:
    adjacent, scattered = make_cases(100 * SMALL.block_bytes, (SMALL,))
    assert not adjacent.is_scattered
    assert len(adjacent.copies()) == SMALL.num_layers
    assert scattered.is_scattered
    assert len(scattered.copies()) > 90 * SMALL.num_layers


def test_transfer_payload_below_two_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        make_cases(SMALL.block_bytes, (SMALL,))


def test_transfer_ratios_pair_common_rounds() -> None:
    done = [turn(TCP_BARE, 3.0), turn("gloo", 2.0), turn(TCP_BARE, 8.0, 1), turn("gloo", 2.0, 1), turn(TCP_BARE, 99, 2)]
    assert figures.round_ratios(done, "a", TCP_BARE, "gloo") == pytest.approx([1.5, 4.0])
    assert figures.round_ratios(done, "b", TCP_BARE, "gloo") == []


def test_transfer_goals_are_judged_at_their_bounds() -> None:
    good = [turn(COPY, 10), turn(SHM_BARE, 9.01), turn(PLAIN, 2), turn(TCP_BARE, 1.91), turn("gloo", 1.4)]
    rows = {row.name: row for row in figures.ratio_rows(good, ("gloo",))}
    assert {name: row.met for name, row in rows.items()} == {
        "ratio.a.shm_bare.copy": True,
        "ratio.a.tcp_bare.plain_tcp": True,
        "ratio.a.tcp_bare.gloo": True,
    }
    bad = [turn(COPY, 10), turn(SHM_BARE, 8.9), turn(PLAIN, 2), turn(TCP_BARE, 1.89), turn("gloo", 1.46)]
    assert num_missed(figures.ratio_rows(bad, ("gloo",))) == 3


def test_transfer_checksum_cost_is_in_time() -> None:
    done = [turn(SHM, 5), turn(SHM_BARE, 6.7), turn(TCP, 2.0), turn(TCP_BARE, 2.3)]
    rows = figures.checksum_rows(done)
    assert [row.value for row in rows] == pytest.approx([34, 15])
    assert [row.met for row in rows] == [True, False]


def test_transfer_python_time_is_judged_per_block() -> None:
    rows = figures.python_rows({("a", "shm"): 0.9e-6, ("a", "tcp"): 1.1e-6})
    assert [row.met for row in rows] == [True, False]


def test_transfer_absent_peer_is_a_row_without_ratio() -> None:
    [row] = figures.absence_rows([Absence(name="nixl", reason="no such package")])
    assert (row.name, row.value) == ("absent.nixl", 1)
    assert "no such package" in row.unit
    assert figures.ratio_rows([turn(TCP_BARE, 2)], ("nixl",)) == []


def test_transfer_rates_are_medians() -> None:
    done = [turn(COPY, rate, i) for i, rate in enumerate((9, 3, 8))]
    [row] = figures.rate_rows(done)
    assert row.value == pytest.approx(8)
    assert describe(done, 1) == "copy 3.00-3.00 GB/s"


def test_transfer_options_name_parts_and_peers() -> None:
    assert options.parts(parsed()) == options.DEFAULT_PARTS
    assert options.parts(parsed("--only", "planning", "rates")) == ("rates", "planning")
    assert options.peers(parsed()) == options.PEER_NAMES
    assert options.peers(parsed("--peer", "gloo", "gloo")) == ("gloo",)
    assert options.peers(parsed("--no-peers")) == ()
    assert set(contestants._VARIABLES) == set(options.PEER_NAMES) >= set(contestants.PEER_ENVIRONMENTS)
    with pytest.raises(SystemExit):
        parsed("--rounds", "0")


def test_transfer_pools_check_every_byte() -> None:
    with Pools(1 << 16) as pools:
        copies = [(0, 4096, 1000), (8192, 0, 24)]
        pools.wipe()
        for here, there, length in copies:
            pools.target[there : there + length] = pools.source[here : here + length]
        pools.check("us", copies)
        pools.target[4096 + 999] ^= 1
        with pytest.raises(WrongBytes, match="1000 bytes at 4096"):
            pools.check("us", copies)
        pools.target[4096 + 999] ^= 1
        pools.target[40_000] = 1
        with pytest.raises(WrongBytes, match="nothing was to land"):
            pools.check("us", copies)


def test_transfer_rates_can_be_plotted(tmp_path: Path) -> None:
    path = tmp_path / "rates.png"
    draw(path, [turn(COPY, 9), turn(TCP, 2), turn("gloo", 1), turn(COPY, 8, case="b")])
    assert path.stat().st_size > 1000
