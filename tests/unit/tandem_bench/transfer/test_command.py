"""The command from end to end with a few megabytes, and with ends that lie, fail or hang."""

import argparse
import asyncio
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from rich.console import Console

from tandem_bench.errors import CannotMeasure
from tandem_bench.report import Row
from tandem_bench.transfer import contestants, options
from tandem_bench.transfer.cases import make_cases, pool_bytes
from tandem_bench.transfer.contestants import Contestant
from tandem_bench.transfer.measure import PeersAbsent, measure
from tandem_bench.transfer.pair import Pair
from tandem_bench.transfer.pools import Pools, WrongBytes
from tandem_bench.transfer.rounds import Field

PAYLOAD = 2 << 20
END = """
class Sender:
    about = {}
    def __init__(self, options, pools):
        self.source, self.target = pools["source"].view, pools["target"].view
        self.copies = {}
    def connect(self, address): pass
    def prepare(self, case, ticket): self.copies[case["name"]] = case["copies"]
    def run(self, name):
        for here, there, length in self.copies[name]:
            self.target[there : there + length] = self.source[here : here + length]
        BODY
        return 1.0
"""


def contestant(folder: Path, body: str) -> Contestant:
    file = folder / "end.py"
    file.write_text(END.replace("BODY", body))
    return Contestant(name="made up", file=file, is_alone=True)


async def admitted(one: Contestant, *, may_fail: bool) -> Field:
    async with AsyncExitStack() as stack:
        pools = stack.enter_context(Pools(pool_bytes(PAYLOAD)))
        field = Field(pools, stack, lambda _text: None)
        await field.admit(one, make_cases(PAYLOAD), may_fail=may_fail)
    return field


async def test_bench_transfer_measures_verifies_and_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "PEER_ENVIRONMENTS", {"nixl": _Impossible()})
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    given = parser.parse_args(["--rounds", "2", "--mib", "2", "--peer", "nixl"])
    rows: list[Row] = []
    quiet = Console(quiet=True)
    with pytest.raises(PeersAbsent, match="nixl: nowhere to be found"):
        await measure(given, rows, out=quiet, err=quiet)
    found = {row.name: row for row in rows}
    names = [one.name.replace(" ", "_") for one in (*contestants.limits(), *contestants.ours())]
    cases = [case.name for case in make_cases(PAYLOAD)]
    assert len(cases) == 4
    for case in cases:
        assert all(found[f"rate.{case}.{name}"].value > 0 for name in names)
        assert all(found[f"cpu.{case}.{name}.sender"].value > 0 for name in names)
        assert found[f"cpu.{case}.plain_tcp.receiver"].value > 0
        assert found[f"ratio.{case}.shm_bare.copy"].goal == ">= 0.9"
        assert found[f"ratio.{case}.tcp_bare.plain_tcp"].goal == ">= 0.95"
        assert found[f"checksum_cost.{case}.shm"].goal == "<= 35"
        assert found[f"checksum_cost.{case}.tcp"].goal == "<= 10"
        assert found[f"python.{case}.tcp"].goal == "<= 1"
    assert found["machine.load"].value >= 0
    assert found["absent.nixl"].value == 1


class _Impossible:
    def __getattr__(self, _name: str) -> object:
        raise CannotMeasure("nowhere to be found")


async def test_bench_transfer_honest_contestant_is_admitted(tmp_path: Path) -> None:
    field = await admitted(contestant(tmp_path, "pass"), may_fail=False)
    assert [pair.name for pair in field.pairs] == ["made up"]
    assert not field.absent


async def test_bench_transfer_wrong_bytes_end_the_measurement(tmp_path: Path) -> None:
    with pytest.raises(WrongBytes, match="made up"):
        await admitted(contestant(tmp_path, "self.target[there] ^= 1"), may_fail=False)


async def test_bench_transfer_failing_peer_is_absent_with_reason(tmp_path: Path) -> None:
    field = await admitted(contestant(tmp_path, "raise OSError('no luck')"), may_fail=True)
    assert not field.pairs
    [absence] = field.absent
    assert "no luck" in absence.reason


async def test_bench_transfer_frozen_processes_end_with_their_pair(tmp_path: Path) -> None:
    with Pools(pool_bytes(PAYLOAD)) as pools:
        pair = Pair(contestant(tmp_path, "pass"), pools)
        await pair.start()
        pid = pair._sender.pid
        pair.freeze()
        assert await asyncio.to_thread(_reaches, pid, "T")
        await pair.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def _reaches(pid: int, state: str) -> bool:
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == state:
            return True
        os.sched_yield()
    return False
