"""Drives a ModelRunner by hand: requests on shuffled blocks, and reference models made with transformers."""

import json
import random
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.backends.options import BackendOptions
from engine.backends.plain_torch import TorchBackend
from engine.backends.select import select_backend
from engine.kernels.cpu.build import KernelsUnavailable
from engine.kernels.cpu.gemm import Arithmetic, supports
from engine.kernels.cpu.library import load_kernels
from engine.kv_storage.paged_cache import TORCH_DTYPES, PagedKVCache
from engine.model.decoder import Decoder
from engine.model.loader import load_model
from engine.model.memory_budget import kv_layout
from engine.runner.model_runner import ModelRunner
from engine.runner.step_input_builder import build_step_inputs
from engine.types.block_table import BlockTable
from engine.types.request import Batch, BatchItem, Request
from tandem.values.ids import BlockHash, BlockId, RequestId
from tandem.values.sampling import SamplingParams

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def needs(arithmetic: Arithmetic) -> None:
    """Skip a test of kernels that cannot be had here: for want of a compiler, or of instructions in the processor.

    Nothing goes untested that could run: the engine then falls back to plain torch, or refuses, which other tests hold.
    """
    try:
        features = load_kernels().features
    except KernelsUnavailable as missing:
        pytest.skip(f"no compiled kernels, plain torch runs instead: {missing}")
    if not supports(features, arithmetic):
        pytest.skip(
            f"this processor has no {arithmetic.value} instructions: the backend refuses or replaces that kernel"
        )


def reference_model(architecture: str, seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model, small and with weights large enough that mistakes show."""
    import transformers

    values: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **overrides,
    }
    if architecture == "MistralForCausalLM":
        values.setdefault("sliding_window", None)
    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(**values)
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config).eval()
    initialise(model)
    return model


def initialise(model: Any, *, norms_around: float = 1.0) -> None:
    """Give a model random weights; `norms_around`: mean of the weights of norms."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(norms_around if is_norm else 0.0, 0.1 if is_norm else 0.15)


def save_and_load(model: Any, path: Path, *, old_rope: bool = False, **load: Any) -> Decoder:
    """Round trip through a directory as users have it; `old_rope` writes transformers 4's configuration."""
    model.save_pretrained(path)
    if old_rope:
        file = path / "config.json"
        raw = json.loads(file.read_text())
        rope = raw.pop("rope_parameters")
        raw["rope_theta"] = rope.pop("rope_theta")
        raw["rope_scaling"] = {"type": rope.pop("rope_type"), **rope} if len(rope) > 1 else None
        file.write_text(json.dumps(raw))
    return load_plain(path, **load)


def load_plain(path: str | Path, *, dtype: str = "float32", device: torch.device | str = "cpu", **load: Any) -> Decoder:
    """A model directory in plain torch operators."""
    return load_model(path, backend=TorchBackend(device=device, dtype=TORCH_DTYPES[dtype]), **load)


def reference_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """One whole forward pass: `[num_tokens, vocab_size]`."""
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)])).logits[0]


def random_tokens(rng: random.Random, count: int, vocab_size: int = 97) -> list[int]:
    return [rng.randrange(3, vocab_size) for _ in range(count)]


class Session:
    """A runner with a pool whose blocks are handed out in random order."""

    def __init__(
        self, model: Decoder, *, num_blocks: int = 64, block_size: int = 4, seed: int = 0, kv_dtype: str = "auto"
    ) -> None:
        layout = kv_layout(
            model.config,
            fingerprint=model.fingerprint,
            dtype=str(model.dtype).removeprefix("torch."),
            block_size=block_size,
            kv_dtype=kv_dtype,
        )
        self.cache = PagedKVCache(layout, num_blocks=num_blocks, device=model.device)
        self.runner = ModelRunner(model, self.cache)
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def request(self, token_ids: Iterable[int], params: SamplingParams | None = None, capacity: int = 128) -> Request:
        tokens = array("i", token_ids)
        count = -(-capacity // self.cache.block_size)
        blocks = [BlockId(self._free.pop()) for _ in range(count)]
        return Request(
            request_id=RequestId("r"),
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            params=params or SamplingParams(temperature=0.0),
            hash_root=BlockHash(b""),
            block_table=BlockTable(blocks),
        )

    def logits(self, request: Request, num_tokens: int) -> Tensor:
        """Compute the next tokens of one request: logits of all of them."""
        item = BatchItem(request=request, start=request.num_computed_tokens, num_tokens=num_tokens, samples=True)
        with torch.inference_mode():
            inputs = build_step_inputs(Batch(items=(item,)), self.cache.block_size)
            result = self.runner.model.logits(self.runner.hidden_states(inputs))
        request.num_computed_tokens += num_tokens
        return result.clone()

    def step(self, work: Sequence[tuple[Request, int]]) -> None:
        """Execute one mixed batch; append what it samples, as the scheduler would."""
        items = tuple(
            BatchItem(
                request=request,
                start=request.num_computed_tokens,
                num_tokens=count,
                samples=request.num_computed_tokens + count == request.num_tokens,
            )
            for request, count in work
        )
        sampled = iter(self.runner.execute(Batch(items=items)))
        for item in items:
            item.request.num_computed_tokens += item.num_tokens
            if item.samples:
                item.request.token_ids.append(next(sampled).token_id)
        assert next(sampled, None) is None

    def run(self, requests: Sequence[Request], num_output: int, chunk: int, rng: random.Random | None = None) -> None:
        """Continuous batching until each has `num_output` tokens; with `rng`, in random order and company."""
        while active := [r for r in requests if r.num_output_tokens < num_output]:
            if rng is not None:
                active = rng.sample(active, rng.randint(1, len(active)))
            self.step([(r, min(r.num_uncomputed_tokens, chunk)) for r in active])


class LoadingRank:
    """A rank that only loads."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def on_kernels(
    path: Path, quantization: str, rank: int = 0, size: int = 1, *, dtype: str = "bfloat16", kv_dtype: str = "auto"
) -> Decoder:
    options = BackendOptions(
        device=torch.device("cpu"), dtype=dtype, quantization=quantization, kv_dtype=kv_dtype, num_threads=1
    )
    return load_model(path, backend=select_backend(options), group=LoadingRank(rank, size) if size > 1 else None)
