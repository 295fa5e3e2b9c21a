"""Engines in processes of their own: the protocol with a toy, and with transformers itself."""

import sys
from pathlib import Path

import pytest

from tandem_bench.engine.footprint import Watch, family, footprint, parse_status
from tandem_bench.engine.workload import Job, outcome
from tandem_bench.make_model import write_model
from tandem_bench.peers.environments import ENVIRONMENTS
from tandem_bench.peers.process import EngineProcess, EngineProcessFailed, Launch
from tandem_bench.shapes import SHAPES

TOY = """
import os, sys

class Adapter:
    about = {"version": "1"}

    def __init__(self, options):
        print("a library's chatter")
        self.memory = bytearray(options["size"])
        if options.get("broken"):
            raise RuntimeError("no such model")

    def run(self, prompts, num_tokens, newcomers):
        print("more chatter")
        if prompts == [[13]]:
            sys.stderr.write("the end is near"); sys.stderr.flush()
            os._exit(3)
        return {"arrivals_s": [[float(i + 1) for i in range(num_tokens)]] * len(prompts), "num_newcomers": 0}

    def close(self):
        pass
"""


def toy(folder: Path, **options: object) -> EngineProcess:
    adapter = folder / "toy.py"
    adapter.write_text(TOY)
    options = {"size": 0, **options}
    return EngineProcess(
        Launch(name="toy", python=Path(sys.executable), adapter=str(adapter), options=options, job_timeout_s=30)
    )


async def ask(process: EngineProcess, *prompts: list[int]) -> dict[str, object]:
    return await process.run({"prompts": list(prompts), "num_tokens": 2, "newcomers": []})


async def test_engine_process_answers_despite_library_output(tmp_path: Path) -> None:
    process = toy(tmp_path)
    await process.spawn()
    try:
        started = await process.ready()
        assert started.about == {"version": "1"}
        assert started.load_s <= started.ready_s
        for prompts in ([[1]], [[1], [2], [3]]):
            assert (await ask(process, *prompts))["arrivals_s"] == [[1.0, 2.0]] * len(prompts)
    finally:
        await process.stop()


async def test_engine_process_failed_start_reports_reason(tmp_path: Path) -> None:
    process = toy(tmp_path, broken=True)
    await process.spawn()
    try:
        with pytest.raises(EngineProcessFailed, match="no such model"):
            await process.ready()
    finally:
        await process.stop()


async def test_engine_process_death_reports_last_output(tmp_path: Path) -> None:
    process = toy(tmp_path)
    await process.spawn()
    try:
        await process.ready()
        with pytest.raises(EngineProcessFailed, match=r"has ended(.|\n)*the end is near"):
            await ask(process, [13])
    finally:
        await process.stop()


async def test_engine_process_memory_is_watched(tmp_path: Path) -> None:
    process = toy(tmp_path, size=64 << 20)
    await process.spawn()
    watch = Watch()
    try:
        async with watch.over(process.pid):
            await process.ready()
        assert watch.peak.peak_bytes >= watch.peak.private_bytes > 64 << 20
    finally:
        await process.stop()


def test_parse_status_reads_memory_lines() -> None:
    text = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t 1024 kB\nRssAnon:\t 512 kB\nThreads:\t3\n"
    assert parse_status(text) == {"VmHWM": 2 << 20, "VmRSS": 1 << 20, "RssAnon": 512 << 10, "RssShmem": 0}


def test_footprint_of_dead_process_is_zero() -> None:
    assert footprint([2**22 - 1]).peak_bytes == 0
    assert family(2**22 - 1) == ()


def test_peer_environments_have_folders_by_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = {environment.folder for environment in ENVIRONMENTS.values()}
    assert len(folders) == len(ENVIRONMENTS)
    assert all(folder.is_relative_to(tmp_path) for folder in folders)
    assert not any(environment.is_complete for environment in ENVIRONMENTS.values())


@pytest.mark.slow
async def test_transformers_peer_answers_like_tandem(tmp_path: Path) -> None:
    from tandem_bench.engine.rig import Rig, assemble_from

    write_model(tmp_path, SHAPES["tiny"], dtype="float32")
    options = {"model": str(tmp_path), "dtype": "float32", "num_threads": 1}
    process = EngineProcess(
        Launch(name="transformers", python=Path(sys.executable), adapter="on_transformers.py", options=options)
    )
    job = Job(prompts=tuple(tuple(range(start, start + 24)) for start in (300, 340, 380)), num_tokens=12)
    await process.spawn()
    try:
        await process.ready()
        reply = await process.run({"prompts": job.prompts, "num_tokens": job.num_tokens, "newcomers": []})
    finally:
        await process.stop()
    overrides = {"model.path": str(tmp_path), "engine.num_blocks": 64, "engine.num_threads": 1, "engine.device": "cpu"}
    with Rig(assemble_from(overrides)) as rig:
        assert rig.run(job).tokens == outcome(job, reply).tokens
