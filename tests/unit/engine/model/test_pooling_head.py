"""Embedding models and classifiers load as decoders; the layers behind them are read whole or refused by name."""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.model.config import load_model_config
from engine.model.families.registry import family_of, has_output_head
from engine.model.loader import load_model
from engine.model.pooling_head import SCORE_WEIGHT, load_pooling_head
from tandem.errors import ConfigError
from tests.support.engine.pooling_models import PoolingFiles, save_classifier, save_embedder, save_judge

SIZE = 64


def load(path: Path):
    options = BackendOptions(device=torch.device("cpu"), dtype="float32", kernels="torch", num_threads=1)
    return load_model(path, backend=select_backend(options))


def test_pooling_head_bare_decoder_loads_with_names_as_saved(tmp_path: Path) -> None:
    """`Qwen3Model` saves `layers.0…`, a causal model `model.layers.0…`: both are the same weights."""
    save_embedder(tmp_path / "bare", PoolingFiles())
    names = load_file(tmp_path / "bare" / "model.safetensors").keys()
    assert "embed_tokens.weight" in names
    config = load_model_config(tmp_path / "bare")
    assert (config.architecture, config.tie_embeddings) == ("Qwen3Model", True)
    bare = load(tmp_path / "bare")
    assert load_pooling_head(tmp_path / "bare", SIZE) is None
    whole = tmp_path / "whole"
    save_embedder(whole, PoolingFiles())
    weights = load_file(whole / "model.safetensors")
    named = {f"model.{name}": tensor for name, tensor in weights.items()}
    save_file(named, whole / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(
        json.dumps(raw | {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False})
    )
    other = load(whole)
    assert torch.equal(bare.embedding(torch.arange(9)), other.embedding(torch.arange(9)))


def test_pooling_head_dense_layers_are_computed_in_order(tmp_path: Path) -> None:
    save_embedder(tmp_path, PoolingFiles(modes=("mean", "lasttoken"), dense=((32, "Tanh"), (8, "Identity"))))
    head = load_pooling_head(tmp_path, SIZE)
    assert head is not None
    vectors = torch.randn(5, 2 * SIZE)
    first, second = (load_file(tmp_path / f"{n}_Dense" / "model.safetensors") for n in (2, 3))
    expected = F.linear(
        torch.tanh(F.linear(vectors, first["linear.weight"], first["linear.bias"])), second["linear.weight"]
    )
    torch.testing.assert_close(torch.tensor(head(vectors.tolist())), expected)


def test_pooling_head_classifier_reads_its_score(tmp_path: Path) -> None:
    save_classifier(tmp_path, num_labels=3)
    assert load(tmp_path).config.tie_embeddings
    head = load_pooling_head(tmp_path, SIZE)
    assert head is not None
    vector = torch.randn(SIZE)
    weight = load_file(tmp_path / "model.safetensors")[SCORE_WEIGHT]
    torch.testing.assert_close(torch.tensor(head([vector.tolist()])), (weight @ vector)[None])


def test_pooling_head_judge_keeps_its_output_head(tmp_path: Path) -> None:
    save_judge(tmp_path)
    assert load_pooling_head(tmp_path, SIZE) is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"linear.weight": torch.zeros(8, 63), "linear.bias": torch.zeros(8)},
            r"must have just linear.weight \[8, 64\]",
        ),
        ({"linear.weight": torch.zeros(8, 64)}, r"linear.bias \[8\]"),
        (
            {"linear.weight": torch.full((8, 64), float("nan")), "linear.bias": torch.zeros(8)},
            "must have finite floats",
        ),
    ],
)
def test_pooling_head_wrong_weights_are_refused(tmp_path: Path, change: dict[str, torch.Tensor], match: str) -> None:
    save_embedder(tmp_path, PoolingFiles(dense=((8, "Tanh"),)))
    save_file(change, tmp_path / "2_Dense" / "model.safetensors")
    with pytest.raises(ConfigError, match=match):
        load_pooling_head(tmp_path, SIZE)


def test_pooling_head_missing_or_foreign_files_are_refused(tmp_path: Path) -> None:
    save_embedder(tmp_path / "m", PoolingFiles(dense=((8, "Tanh"),)))
    file = tmp_path / "m" / "2_Dense" / "model.safetensors"
    file.rename(tmp_path / "away.safetensors")
    with pytest.raises(ConfigError, match=r"2_Dense/model.safetensors is missing"):
        load_pooling_head(tmp_path / "m", SIZE)
    file.symlink_to(tmp_path / "away.safetensors")
    with pytest.raises(ConfigError, match="is a link out of the directory"):
        load_pooling_head(tmp_path / "m", SIZE)
    with pytest.raises(ConfigError, match="word_embedding_dimension is 64, the model's hidden_size 32"):
        load_pooling_head(tmp_path / "m", 32)


def test_pooling_head_encoders_are_refused(tmp_path: Path) -> None:
    """What attends to later tokens is no decoder, whatever its layers are called."""
    save_embedder(tmp_path, PoolingFiles())
    raw = json.loads((tmp_path / "config.json").read_text())
    for change, match in (
        ({"architectures": ["BertModel"]}, "architectures must be one of LlamaForCausalLM"),
        ({"is_causal": False}, "is_causal must be true"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(ConfigError, match=match):
            load_model_config(tmp_path)


def test_families_know_decoders_by_any_head() -> None:
    for name in ("MistralForCausalLM", "MistralModel", "MistralForSequenceClassification", "Gemma3TextModel"):
        assert family_of(name) is not None, name
        assert has_output_head(name) is name.endswith("ForCausalLM")
    assert family_of("BertModel") is None
    assert family_of(None) is None
