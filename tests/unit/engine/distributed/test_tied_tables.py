"""A table that embeds and scores, quantized while it is loaded and cut for ranks, is that of one rank."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.kernels.cpu.gemm import Arithmetic
from engine.model.config import load_model_config
from engine.model.decoder import Decoder
from engine.model.loader import load_model
from engine.model.parallel_group import ParallelGroup
from engine.model.parameters import expected_shapes
from tests.support.engine.paged_harness import Session, needs, random_tokens
from tests.support.engine.thread_ranks import run_ranks

VOCAB, HIDDEN = 97, 128  # with two ranks 49 and 48 tokens, so that the last one's part is padded
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}
SCHEMES = [
    ("int8", "bfloat16"),
    ("int4", "bfloat16"),
    *((one, to) for one in ("fp8", "nf4") for to in ("bfloat16", "float32")),
]
BOUND = {"bfloat16": 0.1, "float32": 1e-5}
"""Greatest root mean square of what several ranks' logits differ by, in spreads of the logits. Sums of ranks are
rounded to the dtype, and int8 and int4 round each rank's inputs by scales of its own."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tied")
    (path / "config.json").write_text(json.dumps(LLAMA))
    generator = torch.Generator().manual_seed(4)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.15 + (1.0 if "norm" in name else 0.0)
        for name, shape in expected_shapes(load_model_config(path)).items()
    }
    tensors["model.embed_tokens.weight"][7] *= 40.0  # a token whose scale no other may have
    save_file(tensors, path / "model.safetensors")
    return path


def loaded(path: Path, quantization: str, dtype: str, group: ParallelGroup | None = None) -> Decoder:
    options = BackendOptions(device=torch.device("cpu"), dtype=dtype, quantization=quantization, num_threads=1)
    return load_model(path, backend=select_backend(options), group=group)


def ends(model: Decoder) -> tuple[Tensor, Tensor]:
    """Embeddings of all tokens, and the logits of some hidden states."""
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(5, HIDDEN, generator=generator).to(model.dtype)
    with torch.inference_mode():
        return model.embedding(torch.arange(VOCAB)).clone(), model.head(hidden).clone()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("quantization", "dtype"), SCHEMES)
def test_tied_table_cut_for_ranks_embeds_and_scores_as_one_rank_bit_for_bit(
    quantization: str, dtype: str, size: int, directory: Path
) -> None:
    needs(Arithmetic.INT8_VECTORS)
    embedded, scored = ends(loaded(directory, quantization, dtype))
    found = run_ranks(size, lambda group: ends(loaded(directory, quantization, dtype, group)))
    assert scored.shape == (5, VOCAB)
    assert torch.equal(found[0][1], scored)
    assert all(torch.equal(one, embedded) for one, _ in found)
    # It is quantized, in eight bits, wherever it is not float32.
    plain = ends(loaded(directory, "none", dtype))
    assert torch.equal(embedded, plain[0]) == torch.equal(scored, plain[1]) == (dtype == "float32")


@pytest.mark.parametrize(("quantization", "dtype"), SCHEMES)
def test_tied_model_of_two_ranks_answers_as_one_within_its_rounding(
    quantization: str, dtype: str, directory: Path
) -> None:
    needs(Arithmetic.INT8_VECTORS)
    tokens = random_tokens(random.Random(3), 40)

    def logits(group: ParallelGroup | None = None) -> Tensor:
        session = Session(loaded(directory, quantization, dtype, group), block_size=16)
        request = session.request(tokens)
        return torch.cat([session.logits(request, count) for count in (17, 22, 1)])

    alone, together = logits(), run_ranks(2, logits)[0]
    error = float((together - alone).square().mean().sqrt() / alone.std())
    assert error < BOUND[dtype], error
    if dtype == "float32":
        assert torch.equal(together.argmax(-1), alone.argmax(-1))
