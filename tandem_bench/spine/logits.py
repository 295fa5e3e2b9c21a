"""Rows of logits: random small models of every architecture and rope type, paged, against transformers in fp32."""

from array import array
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from engine.backends.plain_torch import TorchBackend
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.loader import load_model
from engine.model.memory_budget import kv_layout
from engine.runner.model_runner import ModelRunner
from engine.runner.step_input_builder import build_step_inputs
from engine.types.block_table import BlockTable
from engine.types.request import Batch, BatchItem, Request
from tandem.values.ids import BlockHash, BlockId, RequestId
from tandem.values.sampling import SamplingParams
from tandem_bench.report import Row, figure

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 48,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48},
)
GOAL = 1e-4
_VOCAB = 131
_BLOCK = 16
_NUM_BLOCKS = 16
_DECODED = 12
"""Number of last tokens that are also computed one by one."""


def rows(models_each: int, seed: int = 0) -> list[Row]:
    """Return the largest difference per architecture and way of computing, over `models_each` models per rope type."""
    result = []
    for architecture in ARCHITECTURES:
        rng = Random(f"bench:logits:{seed}:{architecture}")
        found = [difference(architecture, rope, rng) for rope in ROPES for _ in range(models_each)]
        for way in ("prefill", "chunked", "decode"):
            name = f"logits.{architecture.removesuffix('ForCausalLM').lower()}.{way}"
            worst = max(getattr(one, way) for one in found)
            result.append(figure(name, worst, f"largest of {len(found)} models", at_most=GOAL))
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Largest absolute difference of logits in one model."""

    prefill: float
    chunked: float
    decode: float


@torch.inference_mode()
def difference(architecture: str, rope: dict[str, Any], rng: Random) -> Difference:
    """Make a model, save it, load it here, and compare."""
    reference = random_model(architecture, rope, rng)
    tokens = [rng.randrange(3, _VOCAB) for _ in range(rng.randint(50, 100))]
    expected = reference(torch.tensor([tokens])).logits[0]  # [num_tokens, vocab_size]
    with TemporaryDirectory(prefix="tandem-bench-") as folder:
        reference.save_pretrained(folder)
        paged = _PagedModel(Path(folder), rng)
        cuts = sorted(rng.sample(range(1, len(tokens)), 5))
        single = list(range(len(tokens) - _DECODED, len(tokens)))
        return Difference(
            prefill=_distance(paged.logits(tokens, []), expected),
            chunked=_distance(paged.logits(tokens, cuts), expected),
            decode=_distance(paged.logits(tokens, single), expected),
        )


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max())


def random_model(architecture: str, rope: dict[str, Any], rng: Random) -> Any:
    """Build a model with MHA, GQA or MQA, tied or not, with and without biases and windows, and large weights."""
    import transformers

    heads = rng.choice((2, 4, 8))
    values: dict[str, Any] = {
        "vocab_size": _VOCAB,
        "hidden_size": heads * rng.choice((8, 12)),
        "intermediate_size": rng.choice((64, 112)),
        "num_hidden_layers": rng.randint(1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, heads) if heads % n == 0]),
        "head_dim": rng.choice((8, 16)),
        "max_position_embeddings": 160,
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": {"rope_theta": rng.choice((1000.0, 10_000.0)), **rope},
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if architecture == "MistralForCausalLM":
        values["sliding_window"] = rng.choice((None, 7, 20, 33))
    elif architecture == "LlamaForCausalLM":
        values |= {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
    elif rng.random() < 0.5:
        values |= {"use_sliding_window": True, "sliding_window": rng.choice((9, 24)), "max_window_layers": 1}
    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**values)
    torch.manual_seed(rng.randrange(1 << 30))
    model = getattr(transformers, architecture)(config).eval()
    for name, parameter in model.named_parameters():
        is_norm = "norm" in name
        parameter.normal_(1.0 if is_norm else 0.0, 0.1 if is_norm else 0.15)
    return model


class _PagedModel:
    """Model of our engine over a pool whose blocks are allocated in random order."""

    def __init__(self, folder: Path, rng: Random) -> None:
        model = load_model(folder, backend=TorchBackend())
        layout = kv_layout(model.config, fingerprint=model.fingerprint, dtype="float32", block_size=_BLOCK)
        self._runner = ModelRunner(model, PagedKVCache(layout, num_blocks=_NUM_BLOCKS, device=model.device))
        self._rng = rng

    def logits(self, tokens: list[int], cuts: list[int]) -> Tensor:
        """Compute in the pieces that `cuts` bound; return logits of all tokens, [num_tokens, vocab_size]."""
        blocks = [BlockId(i) for i in self._rng.sample(range(_NUM_BLOCKS), -(-len(tokens) // _BLOCK))]
        request = Request(
            request_id=RequestId("bench"),
            token_ids=array("i", tokens),
            num_prompt_tokens=len(tokens),
            params=SamplingParams(temperature=0.0),
            hash_root=BlockHash(b""),
            block_table=BlockTable(blocks),
        )
        pieces = []
        for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            item = BatchItem(request=request, start=start, num_tokens=end - start, samples=True)
            inputs = build_step_inputs(Batch(items=(item,)), _BLOCK)
            pieces.append(self._runner.model.logits(self._runner.hidden_states(inputs)).clone())
            request.num_computed_tokens = end
        return torch.cat(pieces)
