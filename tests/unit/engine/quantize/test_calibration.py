"""Layers run one by one compute what the whole model does, and what is measured are its projections' inputs."""

import random
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from engine.model.checkpoints.safetensors_files import Checkpoint
from engine.model.config import load_model_config
from engine.model.files import ModelDirectory
from engine.quantize.calibration import CalibratedModel
from engine.runner.step_input_builder import build_step_inputs
from engine.types.request import Batch, BatchItem
from tandem.errors import ConfigError
from tests.support.engine.families import FAMILY_CASES, FamilyCase
from tests.support.engine.paged_harness import Session, load_plain, random_tokens, reference_model

SIZES = {"qkv": 48, "output": 64, "gate_up": 48, "down": 80}


def hidden_states(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Of the whole model, before its last norm."""
    session = Session(load_plain(folder))
    item = BatchItem(request=session.request(tokens), start=0, num_tokens=len(tokens), samples=True)
    with torch.inference_mode():
        # Of all rows: the runner's own would be of the sampled ones.
        inputs = build_step_inputs(Batch(items=(item,)), 4)
        plan = session.runner.model.backend.attention(session.runner.model.attention_spec, session.cache).plan(inputs)
        return session.runner.model.forward(torch.tensor(tokens), plan).clone()


@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: case.name)
def test_calibration_layers_compute_what_the_whole_model_does(case: FamilyCase, tmp_path: Path) -> None:
    case.save(case.model(num_hidden_layers=case.layers or 2), tmp_path)
    rng = random.Random(case.name)
    chunks = [random_tokens(rng, count) for count in (30, 1, 17)]
    spec = load_model_config(tmp_path)
    with Checkpoint(ModelDirectory(tmp_path)) as checkpoint, torch.inference_mode():
        model = CalibratedModel(spec, checkpoint, chunks)
        for index in range(spec.num_layers):
            model.advance(index, {})
    for states, chunk in zip(model.states, chunks, strict=True):
        torch.testing.assert_close(states, hidden_states(tmp_path, chunk), atol=1e-4, rtol=1e-4)


def test_calibration_measures_inputs_of_all_rows(tmp_path: Path) -> None:
    reference_model("LlamaForCausalLM").save_pretrained(tmp_path)
    chunks = [[5, 9, 11, 60], [7, 8]]
    spec = load_model_config(tmp_path)
    with Checkpoint(ModelDirectory(tmp_path)) as checkpoint, torch.inference_mode():
        model = CalibratedModel(spec, checkpoint, chunks)
        found = model.measure(0, with_gram=True)
        rows = checkpoint.tensor("model.embed_tokens.weight")[torch.tensor([5, 9, 11, 60, 7, 8])]
        normed = F.rms_norm(rows, (48,), checkpoint.tensor("model.layers.0.input_layernorm.weight"), 1e-5)
        again = model.measure(0, with_gram=False)
    assert {name: len(one.largest) for name, one in found.items()} == SIZES
    torch.testing.assert_close(found["qkv"].largest, normed.abs().amax(dim=0))
    torch.testing.assert_close(found["qkv"].gram, normed.t() @ normed)
    for name, one in found.items():
        assert one.gram is not None
        assert (one.gram.diagonal() <= 6.001 * one.largest.square()).all()
        assert again[name].gram is None
        assert torch.equal(again[name].largest, one.largest)


def test_calibration_advances_with_replaced_tensors(tmp_path: Path) -> None:
    reference_model("LlamaForCausalLM").save_pretrained(tmp_path)
    spec = load_model_config(tmp_path)
    down, output = (f"model.layers.0.{name}.weight" for name in ("mlp.down_proj", "self_attn.o_proj"))
    with Checkpoint(ModelDirectory(tmp_path)) as checkpoint, torch.inference_mode():
        model = CalibratedModel(spec, checkpoint, [[3, 4, 5]])
        before = model.states[0].clone()
        model.advance(0, {down: torch.zeros(48, 80), output: torch.zeros(48, 64)})
        assert torch.equal(model.states[0], before)
        model.advance(1, {})
        assert not torch.equal(model.states[0], before)


@pytest.mark.parametrize("chunks", [[], [[]], [[5], []], [[97]], [[-1]]])
def test_calibration_without_tokens_or_with_unknown_ones_is_refused(chunks: list[list[int]], tmp_path: Path) -> None:
    reference_model("LlamaForCausalLM").save_pretrained(tmp_path)
    with Checkpoint(ModelDirectory(tmp_path)) as checkpoint, pytest.raises(ConfigError, match=r"^calibration: "):
        CalibratedModel(load_model_config(tmp_path), checkpoint, chunks)
