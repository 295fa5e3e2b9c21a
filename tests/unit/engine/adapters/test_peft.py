"""Directories of adapters: what is read from them, and every kind that is refused, with the reason."""

import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.adapters.packing import adapted_parts
from engine.adapters.peft_files import LowRankPair, read_pairs
from engine.model.config import load_model_config
from tandem.adapters.files import read_adapter_content
from tandem.errors import ConfigError
from tests.support.engine.lora import write_adapter
from tests.support.engine.paged_harness import reference_model

QUERIES = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("model")
    reference = reference_model("LlamaForCausalLM")
    reference.save_pretrained(path)
    return reference, path


@pytest.fixture
def adapter(model: tuple[Any, Path], tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter", model[0], rank=4, modules={"q_proj", "down_proj"})


def read(path: Path, model: tuple[Any, Path], max_rank: int = 8) -> dict[str, LowRankPair]:
    parts = (part for parts in adapted_parts(load_model_config(model[1])).values() for part in parts)
    return read_pairs(read_adapter_content(path, max_bytes=1 << 20), parts, max_rank=max_rank)


def configure(path: Path, **changes: Any) -> None:
    file = path / "adapter_config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in raw.items() if value != "absent"}))


def store(path: Path, **changes: torch.Tensor | None) -> None:
    file = path / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors = {name: value.clone() for name, value in tensors.items()}
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, file)


def test_peft_matrices_are_read_by_the_tensor_they_add_to(adapter: Path, model: tuple[Any, Path]) -> None:
    pairs = read(adapter, model)
    assert sorted({name.split(".", 3)[3] for name in pairs}) == ["mlp.down_proj.weight", "self_attn.q_proj.weight"]
    stored = load_file(adapter / "adapter_model.safetensors")
    pair = pairs["model.layers.0.self_attn.q_proj.weight"]
    assert pair.scale == 2.0
    assert torch.equal(pair.down, stored[f"{QUERIES}.lora_A.weight"])
    assert torch.equal(pair.up, stored[f"{QUERIES}.lora_B.weight"])


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"lora_alpha": 6}, 1.5),
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {"layers.0.self_attn.q_proj": 2, "q_proj": 4}}, 0.5),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj$": 2}}, 0.5),
        ({"alpha_pattern": {"proj": 2}}, 2.0),
        ({"rank_pattern": {"q_proj": 4}, "r": 64, "init_lora_weights": "gaussian"}, 2.0),
    ],
    ids=str,
)
def test_peft_scales(changes: dict[str, Any], scale: float, adapter: Path, model: tuple[Any, Path]) -> None:
    configure(adapter, **changes)
    assert read(adapter, model)["model.layers.0.self_attn.q_proj.weight"].scale == scale


CONFIGURATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "another method": ({"peft_type": "IA3"}, "peft_type must be LORA, is 'IA3'"),
    "no method": ({"peft_type": "absent"}, "peft_type must be LORA, is None"),
    "another task": ({"task_type": "SEQ_CLS"}, "task_type must be CAUSAL_LM"),
    "biases": ({"bias": "all"}, "bias must be none, is 'all'"),
    "biases of its own": ({"lora_bias": True}, "lora_bias True is not supported"),
    "DoRA": ({"use_dora": True}, "use_dora True is not supported"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "whole tokens": ({"trainable_token_indices": [5]}, "trainable_token_indices"),
    "replicated layers": ({"layer_replication": [[0, 2], [1, 3]]}, "layer_replication"),
    "transposed matrices": ({"fan_in_fan_out": True}, "fan_in_fan_out True is not supported"),
    "activated by tokens": ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
    "a switch of the future": ({"use_something_new": 1}, "use_something_new 1 is not supported"),
    "PiSSA": ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' changes the model's own"),
    "OLoRA": ({"init_lora_weights": "olora"}, "init_lora_weights"),
    "no rank": ({"r": "absent"}, "r must be an integer of 1 to"),
    "a rank of none": ({"r": 0}, "r must be an integer of 1 to"),
    "a rank of true": ({"r": True}, "r must be an integer of 1 to"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha must be a number above 0"),
    "a negative alpha": ({"lora_alpha": -1}, "lora_alpha must be a number above 0"),
    "an endless alpha": ({"lora_alpha": 1e9}, "lora_alpha must be a number above 0 and at most 1e"),
    "an alpha in words": ({"lora_alpha": "16"}, "lora_alpha must be a number"),
    "a switch in words": ({"use_rslora": "yes"}, "use_rslora must be true or false"),
    "alphas in a list": ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
    "an alpha of none": ({"alpha_pattern": {"q_proj": 0}}, "alpha_pattern must be a number above 0"),
    "a slow pattern": ({"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern '(a+)+$' must be the end of a module's name"),
}


@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_peft_configuration_is_refused(case: str, adapter: Path, model: tuple[Any, Path]) -> None:
    changes, reason = CONFIGURATIONS[case]
    configure(adapter, **changes)
    with pytest.raises(ConfigError) as refusal:
        read(adapter, model)
    assert reason in str(refusal.value)
    assert "adapter_config.json" in str(refusal.value)


TENSORS: dict[str, tuple[Callable[[], dict[str, torch.Tensor | None]], str]] = {
    "the head": (lambda: {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 48)}, "lm_head"),
    "embeddings": (lambda: {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 97)}, "embed_tokens"),
    "a magnitude": (lambda: {f"{QUERIES}.lora_magnitude_vector": torch.ones(64)}, "lora_magnitude_vector"),
    "a bias": (lambda: {f"{QUERIES}.lora_B.bias": torch.ones(64)}, "lora_B.bias"),
    "a layer too many": (
        lambda: {"base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight": torch.ones(4, 48)},
        "layers.3",
    ),
    "an unknown module": (
        lambda: {"base_model.model.model.layers.0.mlp.experts.lora_A.weight": torch.ones(4, 48)},
        "experts",
    ),
    "a norm": (
        lambda: {"base_model.model.model.layers.0.input_layernorm.lora_A.weight": torch.ones(4, 48)},
        "layernorm",
    ),
    "A without B": (lambda: {f"{QUERIES}.lora_B.weight": None}, "q_proj has lora_A only"),
    "B without A": (lambda: {f"{QUERIES}.lora_A.weight": None}, "q_proj has lora_B only"),
    "wide A": (lambda: {f"{QUERIES}.lora_A.weight": torch.ones(4, 49)}, "is [4, 49], which does not fit 48 values"),
    "short B": (lambda: {f"{QUERIES}.lora_B.weight": torch.ones(63, 4)}, "is [63, 4], which does not fit 64 values"),
    "ranks that differ": (
        lambda: {f"{QUERIES}.lora_B.weight": torch.ones(64, 5)},
        "[4, 48] and [64, 5], whose ranks differ",
    ),
    "a rank of none": (
        lambda: {f"{QUERIES}.lora_A.weight": torch.ones(0, 48), f"{QUERIES}.lora_B.weight": torch.ones(64, 0)},
        "does not fit",
    ),
    "a rank too high": (
        lambda: {f"{QUERIES}.lora_A.weight": torch.ones(9, 48), f"{QUERIES}.lora_B.weight": torch.ones(64, 9)},
        "has rank 9, engine.max_adapter_rank is 8",
    ),
    "one dimension": (lambda: {f"{QUERIES}.lora_A.weight": torch.ones(4)}, "floats of two dimensions"),
    "integers": (lambda: {f"{QUERIES}.lora_A.weight": torch.ones(4, 48, dtype=torch.int8)}, "floats of two dimensions"),
    "infinity": (lambda: {f"{QUERIES}.lora_A.weight": torch.full((4, 48), float("inf"))}, "not finite"),
    "no number": (lambda: {f"{QUERIES}.lora_B.weight": torch.full((64, 4), float("nan"))}, "not finite"),
    "the same twice": (
        lambda: {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.ones(4, 48)},
        "is there twice",
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_peft_tensors_are_refused(case: str, adapter: Path, model: tuple[Any, Path]) -> None:
    make, reason = TENSORS[case]
    store(adapter, **make())
    with pytest.raises(ConfigError) as refusal:
        read(adapter, model)
    assert reason in str(refusal.value)
    assert "adapter_model.safetensors" in str(refusal.value)


def test_peft_files_are_refused(adapter: Path, model: tuple[Any, Path]) -> None:
    weights, config = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    whole, text = weights.read_bytes(), config.read_text()
    rng = random.Random(3)
    for size in (0, 7, 8, 100, len(whole) - 1):
        weights.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match="adapter_model"):
            read(adapter, model)
    for _ in range(40):  # a header with a byte changed reads as another adapter or as none, and never fails otherwise
        place = rng.randrange(8, 600)
        weights.write_bytes(whole[:place] + bytes([rng.randrange(256)]) + whole[place + 1 :])
        with suppress(ConfigError):
            read(adapter, model)
    save_file({}, weights)
    with pytest.raises(ConfigError, match="holds no matrices"):
        read(adapter, model)
    weights.unlink()
    (adapter / "adapter_model.bin").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors: No such file"):
        read(adapter, model)
    weights.write_bytes(whole)
    for broken in ("", "[]", "{", '{"r": NaN}', text.replace("}", ', "r": 4}')):
        config.write_text(broken)
        with pytest.raises(ConfigError, match="adapter_config"):
            read(adapter, model)
    config.unlink()
    with pytest.raises(ConfigError, match=r"adapter_config.json: No such file"):
        read(adapter, model)
