"""Candidates for a chunk's checksum, measured on pieces that are still in the cache; in an environment of theirs."""

from collections.abc import Callable
from typing import Any

from tandem_bench.peers.environments import PeerEnvironment, ensure
from tandem_bench.peers.process import EngineProcess, Launch
from tandem_bench.report import Row, figure
from tandem_bench.transfer.pair import END_HOST, ENDS

ENVIRONMENT = PeerEnvironment(
    name="checksums", steps=(("numpy==2.4.6", "isal==1.9.1", "google-crc32c==1.9.0", "xxhash==4.1.0"),)
)
PIECE_KIB = (64, 256, 1024)


async def rows(note: Callable[[str], None]) -> list[Row]:
    """Rates alone, cost after a copy of the same piece, and whether other threads can run. Raises CannotMeasure."""
    python = ensure(ENVIRONMENT, note)
    process = EngineProcess(
        Launch(
            name="checksums",
            python=python,
            adapter=str(ENDS / "on_checksums.py"),
            options={"class": "Sender", "pools": {}, "pool_bytes": 0, "piece_kib": PIECE_KIB},
            host=END_HOST,
        )
    )
    try:
        await process.spawn()
        await process.ready()
        found: list[dict[str, Any]] = (await process.run({"do": "run", "with": {"name": "all"}}))["result"]
    finally:
        await process.stop()
    result = []
    for seen in found:
        name = f"checksum.{seen['name']}.{seen['kib']}k"
        result += [
            figure(name, seen["hot"] / 1e9, "GB/s, cache-hot"),
            figure(f"{name}.after_copy", seen["cost_percent"], "% more time than the copy alone"),
            figure(f"{name}.gil", seen["blocked_percent"], "% of a long call in which no other thread gets a turn"),
        ]
    return result
