"""The GPU suite's hand-off on CPU pools: it runs, and detects errors."""

import time

from tandem_bench.gpu import hand_off as part
from tandem_bench.gpu.hand_off import LAYOUT, NUM_BLOCKS_SMALL, hand_off
from tandem_bench.gpu.stage import Stage
from tandem_bench.report import Row
from tests.support.kv_transfer.transport_needs import require


def test_gpu_suite_hand_off_runs_on_cpu_pools() -> None:
    require("torch_dist")
    stage = Stage(device="cpu", shape="tiny", seed=7, deadline_s=time.monotonic() + 120.0)
    rows = {found.name: found for found in hand_off(stage) if isinstance(found, Row)}
    judged = {name for name, row in rows.items() if row.goal is not None}
    ways = ("tcp", "torch_dist", "shm")
    assert judged == {f"{way}: wrong {what}" for way in ways for what in ("chunks", "bytes")}
    assert all(rows[name].met for name in judged)
    assert all(rows[f"{way}: {what}"].value > 0.0 for way in ways for what in ("from pool to pool", "verified"))


def test_gpu_suite_hand_off_counts_wrong_bytes() -> None:
    pool = part._Pool.filled("host", NUM_BLOCKS_SMALL)
    with part._peer("shm", pool, "host") as peer:
        peer.round()
        assert (peer.bad_chunks, peer.query("compare")) == (0, 0)
        pool.memory[: LAYOUT.layer_block_bytes] += 1
        peer.round()
        assert peer.bad_chunks == 0
        assert peer.query("compare") == LAYOUT.layer_block_bytes
        assert peer.query("verify 0 4 1") == 1, "a wrong checksum"
        peer.expect("grant")
        assert peer.query("compare") > pool.memory.numel() // 2, "a round begins with a blank pool"
