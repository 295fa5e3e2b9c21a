"""The content of an incident's report, and the checks of its parts."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tandem.model_path import BUILTIN, model_directory
from tandem_bench.clusters import Setup
from tandem_bench.incidents import known
from tandem_bench.incidents.__main__ import lines
from tandem_bench.incidents.known import same_bytes
from tandem_bench.incidents.loads import percentile
from tandem_bench.incidents.prometheus import Watch
from tandem_bench.incidents.reproduce import Outcome, Report
from tandem_bench.incidents.scene import Phase


async def _nothing(_url: str, _seconds: float) -> dict[str, float]:
    return {}


def report(*, trouble: float, cured: float) -> Report:
    phase = Phase(name="trouble", setup=Setup(mode="shm"), load=_nothing, is_trouble=True)
    outcomes = tuple(
        Outcome(
            phase=replace(phase, name=name, is_trouble=name == "trouble"),
            watch=Watch.__new__(Watch),
            start_s=100.0,
            end_s=130.0,
            ended_s=140.0,
            clients={"answers": 3.0},
        )
        for name in ("trouble", "cured")
    )
    return Report(outcomes=outcomes, held={"TandemX": (trouble, cured)}, figures={"loss": (5.5, None)})


@pytest.mark.parametrize(
    ("trouble", "cured", "is_shown"), [(1.0, 0.0, True), (0.2, 0.19, True), (0.1, 0.0, False), (1.0, 0.5, False)]
)
def test_incident_report_is_shown_only_if_alerts_match_trouble(trouble: float, cured: float, is_shown: bool) -> None:
    assert report(trouble=trouble, cured=cured).is_shown is is_shown


def test_incident_table_has_a_column_per_phase() -> None:
    table = [line.split() for line in lines(report(trouble=1.0, cured=0.0))]
    assert table == [
        ["trouble", "cured"],
        ["answers", "3", "3"],
        ["loss", "5.5", "-"],
        ["TandemX", "raised", "for", "100%", "raised", "for", "0%"],
    ]
    assert report(trouble=1.0, cured=0.0).outcomes[0].settled_s == 115.0


def test_same_bytes_converts_blocks_between_dtypes() -> None:
    assert same_bytes(256, dtype="float32", as_dtype="int8") == 256 * 4096 // 1152
    assert same_bytes(256, dtype="float32", as_dtype="bfloat16") == 512


def test_percentile_picks_observed_value() -> None:
    assert [percentile(range(100), share) for share in (0.0, 0.5, 0.99, 1.0)] == [0, 50, 99, 99]
    assert percentile([], 0.5) == 0.0


def test_careless_rounding_errs_more_than_careful_rounding(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known.make_rounded()
    before = load_file(model_directory(BUILTIN) / "model.safetensors")

    def error(bits: int) -> float:
        after = load_file(known.rounded_folder(bits) / "model.safetensors")
        assert after.keys() == before.keys()
        matrices = [name for name, tensor in before.items() if tensor.dim() > 1]
        return max(
            float((after[name].float() - before[name].float()).norm() / before[name].float().norm())
            for name in matrices
        )

    careful, careless = error(known.CAREFUL_BITS), error(known.CARELESS_BITS)
    assert careful < 0.02 < 0.1 < careless
    norms = [name for name, tensor in before.items() if tensor.dim() == 1]
    after = load_file(known.rounded_folder(known.CARELESS_BITS) / "model.safetensors")
    assert all(torch.equal(after[name], before[name]) for name in norms)
