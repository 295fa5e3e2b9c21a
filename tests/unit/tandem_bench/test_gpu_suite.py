"""The GPU suite on a CPU, at small sizes: a failing, hanging or dying part does not affect the others."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.plain_torch import TorchBackend
from engine.model.decoder import Decoder
from engine.model.loader import build_model
from tandem.errors import ConfigError
from tandem_bench.gpu.isolation import Result, Status, Workshop
from tandem_bench.gpu.parts import APART, PARTS, Part
from tandem_bench.gpu.serving import Limits
from tandem_bench.gpu.sources import RandomSource
from tandem_bench.gpu.stage import Stage
from tandem_bench.gpu_suite import EXIT_INCOMPLETE, LIMIT_S, describe, num_missed, verdict
from tandem_bench.make_model import write_model
from tandem_bench.report import Row
from tandem_bench.shapes import SHAPES
from tests.support.engine.paged_harness import load_plain

ROOT = Path(__file__).parents[3]
ABSENT = ("fastapi", "hypothesis", "prometheus_client", "pydantic", "redis", "rich", "starlette", "uvicorn")
"""What a GPU machine need not have installed."""
HIDE = f"""
import sys
sys.modules.update(dict.fromkeys({ABSENT!r}))  # None: importing it raises ModuleNotFoundError
"""
KERNELS = (
    *("flash_decode", "paged_prefill", "rope_kv", "add_rms_norm", "silu_mul"),
    *("gemm_few", "gemm_fixed", "group_gemm", "byte_gemm"),
)


def suite(folder: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Run from elsewhere by its path, as on a machine without an installation."""
    bare = folder / "bare"
    bare.mkdir()
    (bare / "sitecustomize.py").write_text(HIDE)
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    file = folder / "gpu.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tandem_bench" / "gpu_suite.py"), "--device", "cpu", "--json", str(file), *options],
        cwd=folder,
        env=inherited | {"PYTHONPATH": str(bare)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert file.exists(), done.stderr
    return done.returncode, json.loads(file.read_text()), done.stdout


def test_gpu_suite_parts_name_existing_modules() -> None:
    assert [part.name for part in PARTS + APART if find_spec(part.module) is None] == []


@pytest.mark.slow  # half a minute
def test_gpu_suite_runs_small_on_cpu(tmp_path: Path) -> None:
    code, found, text = suite(tmp_path)
    assert code == 0, text
    assert found["is_complete"]
    assert [part["part"] for part in found["parts"]] == [part.name for part in PARTS]
    assert {part["status"] for part in found["parts"]} == {"ok"}
    assert found["rows"] == [row for part in found["parts"] for row in part["rows"]]
    judged = {row["name"]: row for row in found["rows"] if row["goal"] is not None}
    expected = {f"parity.{kernel}.{dtype}" for kernel in KERNELS for dtype in ("float32", "float16")}
    modes = ("colocated", "batched", "chunked", "cached", "pipelined")
    expected |= {f"parity.engine.{a}.{m}" for a in ("llama", "mistral", "qwen2", "qwen3") for m in modes}
    expected |= {"parity.sampling.differing", "pipelining.answers", "kv.float32.error", "kv.int8.error", "kv.fp8.error"}
    expected |= {f"{way}: wrong {what}" for way in ("tcp", "torch_dist", "shm") for what in ("chunks", "bytes")}
    assert judged.keys() == expected  # speed is judged on a GPU only
    assert all(row["met"] for row in judged.values())
    assert all(math.isfinite(row["value"]) for row in found["rows"])
    names = {row["name"] for row in found["rows"]}
    assert {"ceiling.read", "decode.1.of_roofline", "decode.1.eager.of_roofline", "kv.int8.gain"} <= names
    assert "prefill.48.of_gemm" in names
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.slow
def test_gpu_suite_runs_transformers_small_on_cpu(tmp_path: Path) -> None:
    code, found, text = suite(tmp_path, "--only", "peer.transformers")
    assert code == 0, text
    assert "transformers.gain" in {row["name"] for row in found["rows"]}


def test_gpu_suite_without_time_starts_nothing_and_is_incomplete(tmp_path: Path) -> None:
    code, found, text = suite(tmp_path, "--limit-s", "0", "--only", "parity", "speed.decode")
    assert code == EXIT_INCOMPLETE
    assert {part["status"] for part in found["parts"]} == {"no time"}
    assert not found["rows"]
    assert "parity.engine (no time)" in text


def test_gpu_suite_budgets_fit_into_eight_minutes() -> None:
    assert LIMIT_S < 480
    assert len({part.name for part in PARTS + APART}) == len(PARTS + APART)
    # What hangs in one part must leave the others their time: even if every one did, each would have had its own.
    assert sum(part.budget_s for part in PARTS) <= LIMIT_S - 20
    assert LIMIT_S >= 450
    assert all(part.budget_s <= LIMIT_S - 20 for part in APART), "each a run of its own"


def test_gpu_suite_parts_of_their_own_run_only_when_named(tmp_path: Path) -> None:
    code, found, _ = suite(tmp_path, "--only", "cluster")
    assert code == 0
    [part] = found["parts"]
    assert (part["part"], part["status"]) == ("cluster", "left out")
    assert "a cluster needs fastapi, prometheus_client, pydantic, rich, starlette, uvicorn, which" in part["error"]


@pytest.fixture(scope="module")
def workshop() -> Workshop:
    made = Workshop(("torch",))
    made.run(part("good"), stage())
    return made


def part(function: str, budget_s: float = 60.0) -> Part:
    return Part(name=function, module="tests.support.gpu_suite_parts", function=function, budget_s=budget_s)


def stage(limit_s: float = 120.0) -> Stage:
    return Stage(device="cpu", shape="tiny", seed=7, deadline_s=time.monotonic() + limit_s)


def test_gpu_suite_part_reports_from_own_process(workshop: Workshop) -> None:
    first, second = workshop.run(part("good"), stage()), workshop.run(part("good"), stage())
    assert first.status is Status.OK
    assert first.notes == {"device": "cpu"}
    assert first.rows[0] == Row(name="missed", value=1.0, unit="", goal=">= 2", met=False)
    assert len({os.getpid(), first.rows[1].value, second.rows[1].value}) == 3


@pytest.mark.parametrize(
    ("function", "status", "words"),
    [
        ("wrong", Status.FAILED, "two and two"),
        ("absent", Status.LEFT_OUT, "no such library"),
        ("broken", Status.FAILED, "line 0 of its log"),
        ("killed", Status.FAILED, "exit code -9"),
        ("not there", Status.FAILED, "has no attribute"),
    ],
)
def test_gpu_suite_ended_part_keeps_its_rows(workshop: Workshop, function: str, status: Status, words: str) -> None:
    result = workshop.run(part(function), stage())
    assert result.status is status
    assert words in str(result.error)
    assert [row.name for row in result.rows] == ([] if function == "not there" else ["before"])


def test_gpu_suite_hanging_part_is_stopped_at_its_budget(workshop: Workshop) -> None:
    result = workshop.run(part("stuck", budget_s=4.0), stage())
    assert result.status is Status.STOPPED
    assert [row.value for row in result.rows] == [7]
    assert result.seconds >= 4.0


def test_gpu_suite_part_ends_at_suite_limit(workshop: Workshop) -> None:
    assert workshop.run(part("stuck"), stage(limit_s=0.5)).status is Status.STOPPED
    assert workshop.run(part("good"), stage(limit_s=0.0)).status is Status.NO_TIME


def test_gpu_suite_failed_process_start_fails_only_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Workshop(("torch",))

    def start(_self: Any) -> None:
        raise ConnectionRefusedError("the server is gone")

    with monkeypatch.context() as patch:
        patch.setattr(refused._context.Process, "start", start)
        result = refused.run(part("good"), stage())
    assert result.status is Status.FAILED
    assert "ConnectionRefusedError" in str(result.error)
    assert refused.run(part("good"), stage()).status is Status.OK


def test_gpu_suite_default_limits_are_those_of_serving() -> None:
    """With recorded steps, unless a part sets something else."""
    bounds = {"num_blocks": 1, "max_rows": 1, "max_tokens": 1, "chunk_tokens": 1, "max_model_len": 1}
    limits = Limits(**bounds)
    assert limits.graphs
    assert limits.pipelined


def test_gpu_suite_verdict_names_missed_goals_and_incomplete_parts() -> None:
    missed = Row(name="slow", value=1.0, unit="x", goal=">= 2", met=False)
    results = [
        Result(
            part="one", status=Status.OK, rows=[missed, Row(name="fast", value=3.0, unit="x", goal=">= 2", met=True)]
        ),
        Result(part="two", status=Status.STOPPED, error="its time was up"),
    ]
    assert num_missed(results) == 1
    assert verdict(results, 12.3) == "12 s, 1 of 2 goals met; missed: slow; incomplete: two (stopped)"
    assert "NOT MET" in describe(results[0])
    assert "its time was up" in describe(results[1])


def random_decoder(part_dtype: torch.dtype = torch.float32) -> Decoder:
    source = RandomSource(SHAPES["tiny"], seed=3, dtype=part_dtype, device=torch.device("cpu"))
    backend = TorchBackend(dtype=torch.float32)
    return build_model(SHAPES["tiny"].model_config("float32"), source, backend=backend)


def test_random_model_equals_model_from_files(tmp_path: Path) -> None:
    write_model(tmp_path, SHAPES["tiny"], dtype="float32", seed=3)
    stored, made = load_plain(tmp_path), random_decoder()
    hidden = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(made.logits(hidden), stored.logits(hidden))
    for ours, theirs in zip(made.layers, stored.layers, strict=True):
        assert torch.equal(ours.gate_up(hidden), theirs.gate_up(hidden))
        assert torch.equal(ours.qkv(hidden), theirs.qkv(hidden))
    assert made.fingerprint != random_decoder(torch.bfloat16).fingerprint


def test_random_model_missing_tensor_is_refused() -> None:
    source = RandomSource(SHAPES["tiny"], seed=0, dtype=torch.float32, device=torch.device("cpu"))
    deeper = replace(SHAPES["tiny"], num_layers=3)
    with pytest.raises(ConfigError, match=r"model\.layers\.2\..* is None"):
        build_model(deeper.model_config("float32"), source, backend=TorchBackend())
