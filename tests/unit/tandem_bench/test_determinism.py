"""The determinism bench measures both modes of one model, and writes rows like the other benches."""

from pathlib import Path

import pytest
import torch

from engine.backends.options import BackendOptions
from engine.kernels.cpu.build import KernelsUnavailable
from engine.kernels.cpu.library import load_kernels
from tandem_bench import determinism
from tandem_bench.determinism import WAYS, Contestant, Plan
from tandem_bench.make_model import write_model
from tandem_bench.report import read_json
from tandem_bench.shapes import SHAPES


def has_kernels() -> bool:
    try:
        load_kernels()
    except KernelsUnavailable:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_kernels(), reason="determinism needs compiled kernels")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, SHAPES["tiny"], dtype="float32", seed=1)
    return tmp_path


def test_bench_determinism_times_and_compares_both_modes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(determinism, "cached_model", lambda *_, **__: folder)
    file = folder / "rows.json"
    code = determinism.main(
        ["--shape", "tiny", "--dtype", "float32", "--rounds", "1", "--threads", "1", "--json", str(file)]
    )
    assert code == 0
    values = {row.name.removeprefix("determinism."): row.value for row in read_json(file)}
    kinds = [f"decode.{batch}" for batch in (1, 4, 16)] + ["prefill.512"]
    assert values.keys() == {f"{kind}.{which}" for kind in kinds for which in (*WAYS, "cost")}
    for kind in kinds:
        default, deterministic = (values[f"{kind}.{way}"] for way in WAYS)
        ratio = default / deterministic if kind.startswith("prefill") else deterministic / default
        assert min(default, deterministic) > 0
        assert values[f"{kind}.cost"] == pytest.approx(100 * (ratio - 1))


def test_bench_determinism_contestant_computes_planned_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = BackendOptions(device=torch.device("cpu"), dtype="float32", deterministic=True)
    contestant = Contestant(folder, options, Plan(batches=(1, 3), prompt_tokens=20))
    batches = []
    execute = contestant._runner.execute
    monkeypatch.setattr(contestant._runner, "execute", lambda batch: batches.append(batch.items) or execute(batch))
    assert contestant.decode(3) > 0
    assert contestant.prefill(2) > 0
    decoded, computed = batches
    assert [(item.start, item.num_tokens) for item in decoded] == [(20, 1)] * 3
    assert [(item.start, item.num_tokens) for item in computed] == [(0, 20)]
    blocks = [block for item in decoded for block in item.request.block_table]
    assert sorted(blocks) == list(range(6)), "each sequence has blocks of its own"
