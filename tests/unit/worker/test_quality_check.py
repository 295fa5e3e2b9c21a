"""A worker that scores a gate's text before it serves, of both kinds, over a real engine thread and scheduler."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tandem.config.cluster import ClusterConfig
from tandem.errors import ConfigError
from tandem.model_path import BUILTIN
from tandem.values.roles import WorkerRole
from tests.support.engine import ledger
from tests.support.engine.ledger_host import settled, started_worker
from worker.decisions.quality_gate import GateWindow, QualityGate
from worker.engine_host import EngineHost
from worker.quality_check import QualityCheck

WINDOWS = [[(7 * i + n) % 90 for i in range(40 + n)] for n in range(3)]
Started = tuple[EngineHost, PrefillWorker | DecodeWorker]


@pytest.fixture(params=["prefill", "decode"])
async def started(request: pytest.FixtureRequest) -> AsyncIterator[Started]:
    async with started_worker(WorkerRole(request.param)) as made:
        yield made


def _gate(certainty: float, windows: list[list[int]] = WINDOWS, vocab_size: int = ledger.VOCAB) -> QualityGate:
    """`certainty` 1: the base expects what the model expects, which is minus each token's id."""
    made = (
        GateWindow(
            token_ids=tuple(ids),
            logprobs=tuple(-i / certainty for i in ids[1:]),
            top_ids=(0,) * (len(ids) - 1),
        )
        for ids in windows
    )
    return QualityGate(base="a base", vocab_size=vocab_size, windows=tuple(made))


def _check(gate: QualityGate) -> QualityCheck:
    return QualityCheck(gate, quantization="auto", where="engine.quality_gate: gate.json")


async def test_worker_like_the_base_passes_and_keeps_nothing(started: Started) -> None:
    host, worker = started
    await _check(_gate(1.0)).run(host, worker)
    ledger.assert_empty(await settled(host))


async def test_worker_worse_than_the_base_is_refused_with_both_figures(started: Started) -> None:
    wrong = (
        r"engine.quality_gate: gate.json: perplexity .* from the base's .* \(limit of float: \+1 %\), "
        "the same likeliest token in 100.0 % of 120 places"
    )
    with pytest.raises(ConfigError, match=wrong):
        await _check(_gate(1.01)).run(*started)


async def test_gate_of_another_vocabulary_is_refused(started: Started) -> None:
    with pytest.raises(ConfigError, match=f"made for a vocabulary of 100000 tokens, the model has {ledger.VOCAB}"):
        await _check(_gate(1.0, vocab_size=100_000)).run(*started)


async def test_window_that_does_not_fit_is_refused_by_name(started: Started) -> None:
    with pytest.raises(ConfigError, match=r"gate.json: windows\.1: .*tokens"):
        await _check(_gate(1.0, [WINDOWS[0], [1] * 100_000])).run(*started)


def _config(**engine: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"model": {"path": BUILTIN}, "engine": engine})


def test_no_gate_is_checked_by_default() -> None:
    assert QualityCheck.from_config(_config(), WorkerRole.DECODE) is None


def test_gate_that_cannot_be_read_is_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "gate.json"
    with pytest.raises(ConfigError, match=f"engine.quality_gate: {file}: No such file"):
        QualityCheck.from_config(_config(quality_gate=str(file)), WorkerRole.PREFILL)
    file.write_text(json.dumps({"version": 3}))
    with pytest.raises(ConfigError, match=f"engine.quality_gate: {file}: version: "):
        QualityCheck.from_config(_config(quality_gate=str(file)), WorkerRole.PREFILL)
    with pytest.raises(ConfigError, match=r"engine/builtin_model/no\.json: No such file"):
        QualityCheck.from_config(_config(quality_gate="no.json"), WorkerRole.PREFILL)
