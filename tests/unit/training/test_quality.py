"""The gates' view of the engine: logits equal transformers' for every chunk, and settings that differ, differ."""

import random

import pytest
import torch

from tandem.model_path import BUILTIN, model_directory
from tandem_bench.quality.engine_forward import CHUNK, EngineForward
from training import quality
from training.quality import SETTINGS

FOLDER = model_directory(BUILTIN)
IDS = random.Random(11).choices(range(300, 2000), k=CHUNK + 70)


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([IDS])).logits[0]


def error(name: str, expected: torch.Tensor) -> float:
    """Root mean square of the difference, in spreads of the logits."""
    ours = EngineForward(FOLDER, SETTINGS[name], num_threads=1)(IDS)
    assert ours.shape == expected.shape
    return float((ours - expected).square().mean().sqrt() / expected.std())


def test_quality_error_of_each_setting_matches_its_precision(expected: torch.Tensor) -> None:
    found = {name: error(name, expected) for name in ("float32", "bfloat16", "int8-kv", "int4-kv")}
    print(found)
    assert found["float32"] < 1e-5
    assert found["float32"] < found["bfloat16"] < found["int8-kv"] < 0.2
    # Steps of 15 in place of 254, over a range that is no wider.
    assert found["int8-kv"] < found["int4-kv"] < 254 / 15 * found["int8-kv"]


def test_quality_rows_cover_every_gate_and_setting() -> None:
    found = quality.rows(
        FOLDER, settings=["bfloat16", "int8-kv", "int4-kv"], samples=2, lengths=[128], text="", num_threads=1
    )
    by_name = {row.name: row for row in found}
    assert len(by_name) == len(found) == 9
    for setting in ("bfloat16", "int8-kv", "int4-kv"):
        story, needle, objects = (row for row in found if row.name.startswith(f"{setting}."))
        assert (story.goal, story.met) == (None, None)
        assert 1.0 < story.value < 5.0
        for row in (needle, objects):
            assert (row.goal, row.met) == (">= 95", row.value >= 95.0)
