"""Random models on disk: every reader reads what was written."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from engine.model.config import load_model_config
from tandem_bench import make_model
from tandem_bench.make_model import cached_model, make_tokenizer, write_model
from tandem_bench.shapes import SHAPES, random_tensor, random_tensors
from tests.support.engine.paged_harness import Session, load_plain, reference_logits

TINY = SHAPES["tiny"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path, TINY, dtype="float32")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "billions"), [("0.04b", 0.04), ("0.5b", 0.44), ("0.9b-moe", 0.92), ("1b", 1.24), ("8b", 8.03)]
)
def test_model_shapes_have_stated_size(name: str, billions: float) -> None:
    assert SHAPES[name].num_parameters / 1e9 == pytest.approx(billions, abs=0.006)


def test_random_tensor_depends_on_name_and_seed() -> None:
    def tensor(name: str, seed: int) -> torch.Tensor:
        return random_tensor(TINY, name, (64, 128), seed=seed, dtype=torch.float32)

    assert torch.equal(tensor("a", 0), tensor("a", 0))
    assert not torch.equal(tensor("a", 0), tensor("b", 0))
    assert not torch.equal(tensor("a", 0), tensor("a", 1))
    assert float(tensor("a", 0).std()) == pytest.approx(128**-0.5, rel=0.05)


def test_random_tensors_cover_the_architecture() -> None:
    made = {name: tuple(tensor.shape) for name, tensor in random_tensors(TINY, seed=0, dtype=torch.bfloat16)}
    assert made == TINY.tensors()


def test_random_model_loads_in_transformers(model: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded, info = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.num_parameters() == TINY.num_parameters
    assert len(AutoTokenizer.from_pretrained(model)) == TINY.vocab_size


def test_random_model_config_is_read_by_engine(model: Path) -> None:
    assert load_model_config(model) == TINY.model_config("float32")


def test_random_model_shards_are_bounded_and_indexed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_model, "SHARD_BYTES", 64 << 10)
    write_model(tmp_path, TINY, dtype="bfloat16")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    assert sorted(set(index["weight_map"].values())) == shards
    assert index["weight_map"].keys() == TINY.tensors().keys()
    # The embedding alone is larger than a shard; nothing shares a file beyond the bound.
    assert max((tmp_path / name).stat().st_size for name in shards) < 2 * (64 << 10)


@pytest.mark.parametrize("vocab_size", [257, 512, 65_536])
def test_random_tokenizer_has_a_text_for_every_id(vocab_size: int) -> None:
    tokenizer = make_tokenizer(vocab_size)
    assert tokenizer.get_vocab_size() == vocab_size
    ids = tokenizer.encode("Tandem 42 öß\n").ids
    assert max(ids) < vocab_size
    assert tokenizer.decode(ids) == "Tandem 42 öß\n"


def test_random_tokenizer_below_byte_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 257"):
        make_tokenizer(256)


def test_model_cache_is_made_once_and_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    notes: list[str] = []
    folder = cached_model(TINY, note=notes.append)
    assert len(notes) == 2
    assert cached_model(TINY, note=notes.append) == folder
    assert len(notes) == 2
    assert cached_model(TINY, seed=1) != folder
    Tokenizer.from_file(str(folder / "tokenizer.json"))

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(make_model, "write_model", fail)
    with pytest.raises(OSError, match="disk full"):
        cached_model(TINY, seed=2)
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, cached_model(TINY, seed=1).name}


def test_random_mixture_of_experts_computes_as_transformers_does(tmp_path: Path) -> None:
    write_model(tmp_path, SHAPES["tiny-moe"], dtype="float32")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = list(range(3, 30))
    session = Session(load_plain(tmp_path))
    ours = session.logits(session.request(tokens), len(tokens))
    torch.testing.assert_close(ours, reference_logits(reference, tokens), atol=1e-4, rtol=0.0)
