"""Named random models: real geometries with seeded weights, so that speed needs no download and parity has a subject.

Weights are normal with variance 1 / fan-in, as in LeCun initialisation ("Efficient BackProp", 1998): activations keep
their size through the layers, so every layer matters and greedy output depends on the whole context.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.model.config import parse_model_config
from engine.model.parameters import expected_shapes
from engine.model.spec import ModelSpec

_QWEN3 = "Qwen3ForCausalLM"
_LLAMA = "LlamaForCausalLM"
_QWEN3_MOE = "Qwen3MoeForCausalLM"
_MODEL_TYPES = {_QWEN3: "qwen3", _LLAMA: "llama", _QWEN3_MOE: "qwen3_moe"}
END_ID = 0
"""End token, which benchmarks treat like any other in prompts and answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Geometry of one named model."""

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tied: bool
    max_positions: int = 8192
    rope_theta: float = 1e6
    num_experts: int = 0
    """Experts of each layer, of which `intermediate_size` is the size; 0: a dense model."""
    experts_per_token: int = 0

    def hf_config(self, dtype: str) -> dict[str, Any]:
        """Return the content of `config.json`."""
        return {
            "architectures": [self.architecture],
            "model_type": _MODEL_TYPES[self.architecture],
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": self.rope_theta,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": self.tied,
            "bos_token_id": END_ID,
            "eos_token_id": END_ID,
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": dtype,
            **self._mixture(),
        }

    def _mixture(self) -> dict[str, Any]:
        if not self.num_experts:
            return {}
        return {
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.intermediate_size,
            "norm_topk_prob": True,
        }

    def model_config(self, dtype: str = "bfloat16") -> ModelSpec:
        """Return the configuration as the engine reads it."""
        return parse_model_config(self.hf_config(dtype), {})

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return every stored tensor, by its Hugging Face name, with its shape."""
        return expected_shapes(self.model_config())

    @property
    def num_parameters(self) -> int:
        """Number of stored weights; tied ones count once."""
        return sum(torch.Size(size).numel() for size in self.tensors().values())


SHAPES: Mapping[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(
            name="tiny",
            architecture=_QWEN3,
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            tied=True,
            max_positions=1024,
        ),
        # Small enough for many experiments, too large for a second-level cache: decoding still reads memory.
        Shape(
            name="0.04b",
            architecture=_QWEN3,
            vocab_size=16_384,
            hidden_size=512,
            intermediate_size=2048,
            num_layers=8,
            num_heads=8,
            num_kv_heads=4,
            head_dim=64,
            tied=True,
        ),
        # The reference model of the engine's figures.
        Shape(
            name="0.5b",
            architecture=_QWEN3,
            vocab_size=65_536,
            hidden_size=1024,
            intermediate_size=4096,
            num_layers=24,
            num_heads=16,
            num_kv_heads=8,
            head_dim=64,
            tied=True,
        ),
        Shape(
            name="1b",
            architecture=_LLAMA,
            vocab_size=128_256,
            hidden_size=2048,
            intermediate_size=8192,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
            head_dim=64,
            tied=True,
            rope_theta=5e5,
        ),
        Shape(
            name="8b",
            architecture=_LLAMA,
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            tied=False,
            max_positions=32_768,
            rope_theta=5e5,
        ),
        Shape(
            name="tiny-moe",
            architecture=_QWEN3_MOE,
            vocab_size=512,
            hidden_size=64,
            intermediate_size=32,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            tied=True,
            max_positions=1024,
            num_experts=8,
            experts_per_token=2,
        ),
        # A token reads two fifths of what the reference model's layers have, out of more than twice as much.
        Shape(
            name="0.9b-moe",
            architecture=_QWEN3_MOE,
            vocab_size=65_536,
            hidden_size=1024,
            intermediate_size=512,
            num_layers=16,
            num_heads=16,
            num_kv_heads=8,
            head_dim=64,
            tied=True,
            num_experts=32,
            experts_per_token=4,
        ),
    )
}
REFERENCE = "0.5b"


def random_tensors(
    shape: Shape, *, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of the model, made when needed; no two exist at once unless kept."""
    for name, size in shape.tensors().items():
        yield name, random_tensor(shape, name, size, seed=seed, dtype=dtype, device=device)


def random_tensor(
    shape: Shape,
    name: str,
    size: tuple[int, ...],
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Generate one tensor from the arguments alone; the numbers differ between kinds of devices.

    Norms are one, with a little noise so that errors in them show; matrices are normal with deviation 1/sqrt(fan-in). A
    tied embedding counts as the head: its fan-in is the hidden size.
    """
    word = hashlib.blake2b(f"{shape.name}:{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(word, "little") >> 1)
    is_norm = len(size) == 1
    tensor = torch.empty(size, dtype=dtype, device=device)
    if is_norm:
        return tensor.normal_(1.0, 0.1, generator=generator)
    return tensor.normal_(0.0, size[-1] ** -0.5, generator=generator)
