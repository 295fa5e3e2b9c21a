"""The whole engine on tiny random models, in float32, against transformers: the same greedy tokens in every mode."""

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.model.config import parse_model_config
from engine.model.decoder import Decoder
from engine.model.loader import build_model
from tandem_bench.errors import CannotMeasure
from tandem_bench.gpu.kernels.cases import naming
from tandem_bench.gpu.serving import Limits, Serving, Tokens, pool_blocks
from tandem_bench.gpu.sources import HeldSource
from tandem_bench.gpu.stage import Findings, Note, Stage
from tandem_bench.report import figure

_VOCAB_SIZE = 97
_LENGTHS = (1, 3, 15, 16, 17, 33, 70)
_SMALL_LENGTHS = (3, 17, 33)
_MAX_LENGTH = 128
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"tie_word_embeddings": True},
    "MistralForCausalLM": {"sliding_window": 21},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """Way to run the same prompts, with its engine options."""

    name: str
    options: BackendOptions
    chunk_tokens: int = 512
    together: bool = True
    """Whether all prompts run at once, instead of one after another."""
    repeated: bool = False
    """Whether prompts run again over blocks that the first run left in the cache."""
    pipelined: bool = False
    """Whether each step is launched before the previous one has ended, when only the device knows its tokens."""
    graphs: bool = False
    """Whether decode steps are recorded at start and replayed."""


def engine_parity(stage: Stage) -> Findings:
    """Count tokens that differ, by architecture and mode."""
    if importlib.util.find_spec("transformers") is None:
        raise CannotMeasure("transformers is not installed")
    rng = Random(f"engine:{stage.seed}")
    lengths, num_tokens = (_SMALL_LENGTHS, 5) if stage.is_small else (_LENGTHS, 24)
    prompts = [tuple(rng.randrange(3, _VOCAB_SIZE) for _ in range(length)) for length in lengths]
    yield Note(name="modes", text=", ".join(mode.name for mode in modes(stage)))
    for architecture, overrides in _ARCHITECTURES.items():
        reference = _reference(architecture, stage.seed, overrides)
        expected = [_greedy(reference, prompt, num_tokens) for prompt in prompts]
        for mode in modes(stage):
            with naming(f"{architecture}, {mode}"), _ieee_products():
                wrong = _count_wrong(_model(reference, mode), mode, prompts, expected)
            name = f"parity.engine.{architecture.removesuffix('ForCausalLM').lower()}.{mode.name}"
            yield figure(name, wrong, f"of {len(prompts) * num_tokens} tokens differ", at_most=0)


def modes(stage: Stage) -> tuple[Mode, ...]:
    """Return the modes to compare; on a CPU only those of plain torch, see Stage.backend_options."""
    best = replace(stage.backend_options, dtype="float32")
    shared = (
        Mode(name="colocated", options=best, together=False),
        Mode(name="batched", options=best),
        Mode(name="chunked", options=best, chunk_tokens=7),
        Mode(name="cached", options=best, repeated=True),
        Mode(name="pipelined", options=best, chunk_tokens=7, pipelined=True),
    )
    if stage.is_small:
        return shared
    plain = replace(best, kernels="torch")
    replayed = (
        Mode(name="graphs", options=best, graphs=True),
        Mode(name="pipelined-graphs", options=best, graphs=True, pipelined=True),
    )
    return (*shared, *replayed, Mode(name="plain-torch", options=plain), *_deterministic(best))


def _deterministic(best: BackendOptions) -> Iterator[Mode]:
    """Yield the deterministic mode, which only our own kernels support, and not every version of them."""
    if select_backend(best).name != "torch":
        yield Mode(name="deterministic", options=replace(best, deterministic=True), chunk_tokens=7)


@contextmanager
def _ieee_products() -> Iterator[None]:
    """Compute float32 products in float32, whatever a default says about TensorFloat-32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _reference(architecture: str, seed: int, overrides: dict[str, Any]) -> Any:
    """Build a random transformers model on the CPU, with weights large enough that errors show."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = getattr(transformers, architecture.replace("ForCausalLM", "Config"))(
        **{
            "vocab_size": _VOCAB_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16 if architecture != "Qwen3ForCausalLM" else 32,
            "max_position_embeddings": _MAX_LENGTH,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **overrides,
        }
    )
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if "norm" in name else 0.0
            parameter.normal_(around, 0.1 if around else 0.15)
    return model


@torch.inference_mode()
def _greedy(model: Any, prompt: Tokens, num_tokens: int) -> Tokens:
    """Generate greedily; transformers' `generate` would stop at the end token."""
    tokens: list[int] = []
    step, cache = torch.tensor([prompt]), None
    while len(tokens) < num_tokens:
        out = model(step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        tokens.append(int(out.logits[0, -1].argmax()))
        step = torch.tensor([tokens[-1:]])
    return tuple(tokens)


def _model(reference: Any, mode: Mode) -> Decoder:
    config = parse_model_config({**reference.config.to_dict(), "architectures": [type(reference).__name__]}, {})
    return build_model(config, HeldSource(reference.state_dict()), backend=select_backend(mode.options))


def _count_wrong(model: Decoder, mode: Mode, prompts: Sequence[Tokens], expected: Sequence[Tokens]) -> int:
    """Count tokens that differ from the reference. CannotMeasure when a mode did not do what its name says."""
    num_tokens = len(expected[0])
    limits = Limits(
        num_blocks=pool_blocks(2 * len(prompts), _MAX_LENGTH),
        max_rows=len(prompts),
        max_tokens=512,
        chunk_tokens=mode.chunk_tokens,
        max_model_len=_MAX_LENGTH,
        pipelined=mode.pipelined,
        graphs=mode.graphs,
    )
    with Serving(model, limits) as serving:
        if mode.together:
            served = serving.run(prompts, num_tokens)
            answers = served.tokens
        else:
            answers = tuple(serving.run([prompt], num_tokens).tokens[0] for prompt in prompts)
        if mode.repeated:
            again = serving.run(prompts, num_tokens)
            if not again.num_cached_tokens:
                raise CannotMeasure("nothing was found in the prefix cache")
            answers = again.tokens
    pairs = [pair for ours, theirs in zip(answers, expected, strict=True) for pair in zip(ours, theirs, strict=True)]
    return sum(ours != theirs for ours, theirs in pairs)
