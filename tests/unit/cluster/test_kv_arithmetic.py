"""The runbook's KV arithmetic equals the engine's."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.kv_arithmetic import SizingOptions, layout_of, main, num_parameters, read_model, room
from engine.assembly import assemble
from tandem.config.cluster import load
from tandem.model_path import model_directory
from tandem.values.roles import WorkerRole
from tests.support.engine.gguf_writer import write_gguf
from worker.engine_spec import engine_spec

ROOT = Path(__file__).parents[3]
LONE = {"prefill.replicas": 0, "secret": "0123456789abcdef", "engine.device": "cpu", "engine.num_threads": 1}


def test_kv_arithmetic_matches_engine() -> None:
    memory_bytes, kv_dtype = 1 << 30, "int8"
    config = load(None, LONE | {"engine.memory_bytes": memory_bytes, "engine.kv_dtype": kv_dtype})
    parts = assemble(engine_spec(config, WorkerRole.DECODE))
    model = read_model("builtin")
    found = room(model, SizingOptions(dtype="float32", kv_dtype=kv_dtype, rank_bytes=memory_bytes))
    assert found.block_bytes == parts.layout.worker_block_bytes
    assert found.bytes_per_token == parts.layout.worker_block_bytes // parts.layout.block_size
    # The engine may keep some weights in a second order, and knows its workspace by measuring it.
    assert found.weights_bytes == pytest.approx(parts.budget.weights_bytes, rel=0.02)
    spoken_for = parts.budget.weights_bytes + parts.budget.workspace_bytes + parts.budget.headroom_bytes
    estimated = found.weights_bytes + found.workspace_bytes + parts.budget.headroom_bytes
    assert found.num_blocks * found.block_bytes == pytest.approx(memory_bytes - estimated, abs=found.block_bytes)
    assert spoken_for <= estimated * 1.02


def test_kv_arithmetic_reads_gguf_file(tmp_path: Path) -> None:
    write_gguf(model_directory("builtin"), tmp_path / "tiny.gguf", pre="smollm")
    model = read_model(str(tmp_path / "tiny.gguf"))
    assert num_parameters(model) == num_parameters(read_model("builtin"))


def test_kv_arithmetic_parameters_match_checkpoint() -> None:
    model = read_model("builtin")
    with (ROOT / "engine/builtin_model/model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = [tensor["shape"] for name, tensor in header.items() if name != "__metadata__"]
    stored = 0
    for shape in shapes:
        size = 1
        for dim in shape:
            size *= dim
        stored += size
    assert num_parameters(model) == stored


def test_kv_arithmetic_matches_table_in_handbook() -> None:
    page = (ROOT / "docs/operate/capacity.md").read_text()
    row = r"^\| [^|]+ \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) KiB \| ([\d.]+) KiB \| ([\d.]+) KiB \|"
    rows = re.findall(row, page, re.MULTILINE)
    assert len(rows) >= 5
    model = read_model("builtin")
    for layers, heads, dim, plain, eight, four in rows:
        layer = replace(model.layers[0], num_kv_heads=int(heads), num_heads=int(heads), head_dim=int(dim))
        like = replace(model, layers=(layer,) * int(layers))
        for kv_dtype, kib in (("auto", plain), ("int8", eight), ("int4", four)):
            layout = layout_of(like, SizingOptions(kv_dtype=kv_dtype))
            assert layout.worker_block_bytes / layout.block_size / 1024 == pytest.approx(float(kib), abs=0.05)


def test_kv_arithmetic_model_beyond_memory_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["builtin", "--memory-gb", "0.01"]) == 2
    assert "no memory left for KV" in capsys.readouterr().err
    assert main(["builtin", "--dtype", "float32", "--memory-gb", "2"]) == 0
    assert "kv_tokens=" in capsys.readouterr().out
