"""A model of one GGUF file, with nothing beside it, computes what the directory computes that it was made of."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.kernels.cpu.gemm import Arithmetic
from engine.model.checkpoints.gguf.file import GgufFile
from engine.model.config import parse_model_config
from engine.model.loader import expected_shapes
from tandem.errors import ConfigError
from tandem.gguf.container import open_header
from tandem.model_path import BUILTIN, model_directory
from tests.support.engine.gguf_writer import write_gguf
from tests.support.engine.paged_harness import Session, load_plain, needs, on_kernels

TOKENS = [5, 17, 3, 80, 41, 8, 8, 96]
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 97,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}


def logits(path: Path) -> torch.Tensor:
    session = Session(load_plain(path))
    return session.logits(session.request(TOKENS), len(TOKENS)).clone()


def write_directory(folder: Path, changes: dict[str, Any]) -> None:
    folder.mkdir()
    config = CONFIG | changes
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(7)
    shapes = expected_shapes(parse_model_config(config, {}))
    tensors = {name: 0.3 * torch.randn(*shape, generator=draw) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("LlamaForCausalLM", {"tie_word_embeddings": True}),
        ("MistralForCausalLM", {"sliding_window": 4}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
        ("Qwen3ForCausalLM", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    ],
)
@pytest.mark.parametrize("block_type", ["F32", "Q8_0", "Q4_1"])
def test_gguf_alone_has_logits_of_the_directory_with_restored_weights(
    architecture: str, changes: dict[str, Any], block_type: str, tmp_path: Path
) -> None:
    source, dense, file = tmp_path / "source", tmp_path / "dense", tmp_path / "file" / "model.gguf"
    write_directory(source, changes | {"architectures": [architecture]})
    file.parent.mkdir()
    restored = write_gguf(source, file, block_type=block_type)
    dense.mkdir()
    (dense / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file({name: values.contiguous() for name, values in restored.items()}, dense / "model.safetensors")
    assert torch.equal(logits(file), logits(dense))
    assert torch.equal(logits(file), logits(source)) is (block_type == "F32")


def test_gguf_alone_may_be_a_link_and_is_named_by_what_it_holds(tmp_path: Path) -> None:
    write_directory(tmp_path / "source", {"architectures": ["LlamaForCausalLM"]})
    write_gguf(tmp_path / "source", tmp_path / "blob")
    (tmp_path / "snapshots").mkdir()
    link = tmp_path / "snapshots" / "model.gguf"
    link.symlink_to("../blob")  # as in a hub's cache
    whole = load_plain(link)
    assert torch.isfinite(logits(link)).all()
    write_gguf(tmp_path / "source", tmp_path / "other.gguf", block_type="Q8_0")
    assert load_plain(tmp_path / "other.gguf").fingerprint != whole.fingerprint


def test_gguf_alone_header_is_the_same_with_and_without_torch(tmp_path: Path) -> None:
    """The router reads it without torch, a worker with its weights."""
    write_directory(tmp_path / "source", {"architectures": ["Qwen2ForCausalLM"]})
    write_gguf(tmp_path / "source", tmp_path / "model.gguf")
    opened = GgufFile(tmp_path / "model.gguf")
    with open_header(tmp_path / "model.gguf") as header:
        assert (header.metadata, header.tensors) == (opened.header.metadata, opened.header.tensors)
    opened.close()


def test_gguf_of_another_name_is_no_model(tmp_path: Path) -> None:
    write_directory(tmp_path / "source", {"architectures": ["Qwen2ForCausalLM"]})
    write_gguf(tmp_path / "source", tmp_path / "model.bin")
    with pytest.raises(ConfigError, match=r"model directory .*model\.bin does not exist or is not a directory"):
        load_plain(tmp_path / "model.bin")


def test_gguf_mixture_of_four_and_six_bits_is_multiplied_as_stored(tmp_path: Path) -> None:
    """Queries and keys in four bits are read together with values in six; 640 columns are no whole blocks."""
    needs(Arithmetic.INT4)
    file = tmp_path / "tiny-q4_k_m.gguf"
    write_gguf(model_directory(BUILTIN), file, block_type="Q4_K_M", pre="smollm")
    stored, restored = on_kernels(file, "stored"), on_kernels(file, "none")
    assert stored.num_kept == 4 * len(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"))
    assert stored.weights_bytes < 0.65 * restored.weights_bytes
    session, other = Session(stored), Session(restored)
    found = session.logits(session.request(TOKENS), len(TOKENS))
    expected = other.logits(other.request(TOKENS), len(TOKENS))
    assert (found - expected).square().mean().sqrt() < 0.04 * expected.std()
