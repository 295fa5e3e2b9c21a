"""What a model is made of: a ModelSpec, whose layers are LayerSpecs.

A family of architectures (`engine.model.families`) reads `config.json` into these; loader, decoder, backends and the
arithmetic of memory read nothing else. Everything has Llama's value by default.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

from engine.model.rope_config import RopeConfig
from tandem.errors import ConfigError


class Activation(Enum):
    """Function of the gate of a gated MLP; values are Hugging Face's names."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


class NormKind(Enum):
    """How a norm scales its input."""

    RMS = "rms"
    """To unit root mean square."""
    LAYER = "layer"
    """To zero mean and unit variance."""


class QKNorm(Enum):
    """How queries and keys are normed before the rotation."""

    HEAD = "head"
    """RMSNorm over each head, with one weight for all heads."""
    PROJECTION = "projection"
    """RMSNorm over all heads together."""
    HEAD_LAYER = "head_layer"
    """LayerNorm over each head, with a weight for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """The norms of a model: of blocks, of their results, of the last hidden states."""

    eps: float
    kind: NormKind = NormKind.RMS
    has_bias: bool = False
    weight_offset: float = 0.0
    """Added to stored weights: 1 where a checkpoint stores what the weight exceeds 1 by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture of experts in an MLP's place (Shazeer et al., 2017): gated MLPs, of which a router chooses a few for
    each token by a softmax over all.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    """Values of an expert's gate."""
    normalizes_weights: bool
    """Whether the weights of a token's experts are divided by their sum."""
    shared_size: int | None = None
    """Values of the gate of one more expert, which computes every token, weighted by a sigmoid; None: there is none."""

    @property
    def has_shared(self) -> bool:
        """Whether one expert computes every token."""
        return self.shared_size is not None

    @property
    def active_size(self) -> int:
        """Values of the gates that a token's experts have together."""
        return self.experts_per_token * self.expert_size + (self.shared_size or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer: attention, gated MLP or mixture of experts, and the norms around them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope: RopeConfig | None
    """None: positions are not rotated."""
    window: int | None = None
    """Number of latest tokens, itself included, that a token attends to; None: all."""
    scale: float | None = None
    """Factor on products of queries and keys; None: `head_dim ** -0.5`."""
    soft_cap: float | None = None
    """Bound that scaled products are bent to, `cap * tanh(product / cap)`; None: unbounded."""
    qk_norm: QKNorm | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = Activation.SILU
    has_input_norms: bool = True
    """Norms of what attention and MLP read."""
    has_output_norms: bool = False
    """Norms of what attention and MLP return, before that is added to the residual stream."""
    is_parallel: bool = False
    """Attention and MLP read the same normed input; there is no second norm."""
    moe: MoeSpec | None = None
    """The mixture of experts in the MLP's place; `intermediate_size` then says nothing. None: a dense MLP."""

    def __post_init__(self) -> None:
        """Raises ConfigError for experts with parts that only dense MLPs have."""
        is_plain = self.has_input_norms and not self.is_parallel and not self.mlp_bias
        if self.moe is not None and not (is_plain and self.activation is Activation.SILU):
            raise ConfigError("experts must have SiLU's gate, no biases, and a norm of their own before them")

    @property
    def score_scale(self) -> float:
        """Factor on products of queries and keys."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def active_size(self) -> int:
        """Values of gates that are computed for a token."""
        return self.intermediate_size if self.moe is None else self.moe.active_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredNames:
    """Names of a layer's tensors in a checkpoint, without prefix and kind."""

    queries: str = "self_attn.q_proj"
    keys: str = "self_attn.k_proj"
    values: str = "self_attn.v_proj"
    fused_qkv: str | None = None
    """One tensor with the rows of queries, keys and values."""
    output: str = "self_attn.o_proj"
    query_norm: str = "self_attn.q_norm"
    """With `{head}` where every head has a tensor of its own."""
    key_norm: str = "self_attn.k_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    fused_gate_up: str | None = None
    """One tensor with the rows of the gate and of what it gates."""
    down: str = "mlp.down_proj"
    expert_router: str = "mlp.gate"
    expert: str = "mlp.experts.{expert}"
    """Beginning of the names of an expert's tensors."""
    expert_gate: str = "gate_proj"
    expert_up: str = "up_proj"
    expert_down: str = "down_proj"
    shared_expert: str = "mlp.shared_expert"
    shared_router: str = "mlp.shared_expert_gate"
    """One row, whose product with the input the sigmoid is of."""
    attention_norm: str = "input_layernorm"
    attention_output_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_output_norm: str = "post_feedforward_layernorm"


_LEGACY_ROPE = (
    "rope_type", "theta", "max_positions", "factor", "original_max_positions", "low_freq_factor", "high_freq_factor",
    "beta_fast", "beta_slow", "truncate", "attention_factor",
)  # fmt: skip
_LEGACY_LAYER = frozenset(
    {
        "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "rope", "window", "qkv_bias", "output_bias",
        "mlp_bias", "qk_norm",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Geometry and switches of a decoder-only transformer.

    All layers have as many heads of one size, since one KV layout describes them all.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    tie_embeddings: bool
    embedding_scale: float = 1.0
    """Factor on embeddings."""
    rounds_embedding_scale: bool = False
    """Whether that factor is rounded to the dtype that is computed in."""
    logit_scale: float = 1.0
    """Factor on logits."""
    logit_cap: float | None = None
    """Bound that logits are bent to after that, as LayerSpec.soft_cap."""
    names: StoredNames = field(default_factory=StoredNames)
    stored_dtype: str | None = None
    """Dtype of the checkpoint according to config.json; None where it has none."""
    eos_token_ids: tuple[int, ...] = ()
    weight_format: str | None = None
    """The format that weights are quantized in, as logs call it; None: none."""

    def __post_init__(self) -> None:
        """Raises ConfigError for layers that differ in what one KV layout and one attention backend share."""
        if len({_shared(layer) for layer in self.layers}) != 1:
            raise ConfigError(f"config.json: all layers of {self.architecture} must have heads of one geometry")
        if len({layer.moe for layer in self.layers if layer.moe is not None}) > 1:
            raise ConfigError(f"config.json: all experts of {self.architecture} must have one geometry")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Query heads of a layer."""
        return self.layers[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key-value heads of a layer."""
        return self.layers[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Values of a head."""
        return self.layers[0].head_dim

    @property
    def intermediate_size(self) -> int:
        """Values of an MLP's gate."""
        return self.layers[0].intermediate_size

    @property
    def moe(self) -> MoeSpec | None:
        """The mixture of experts of the layers that have one, which is the same in all; None for a dense model."""
        return next((layer.moe for layer in self.layers if layer.moe is not None), None)

    @property
    def is_sparse_throughout(self) -> bool:
        """Whether every layer has a mixture of experts."""
        return all(layer.moe is not None for layer in self.layers)

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None: all tokens."""
        return tuple(layer.window for layer in self.layers)

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The layers' distinct rotations, in the order of their first layers."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers))

    @property
    def max_context(self) -> int:
        """Most tokens, prompt and output together, that one sequence may have."""
        return max(rope.max_context for rope in self.ropes if rope is not None)

    @property
    def group_size(self) -> int:
        """Number of query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def flops_per_token(self) -> int:
        """Multiplications and additions per token in the layers' products, without attention and output head; of the
        experts, those that compute it.
        """
        return 2 * sum(self.active_weights(layer) for layer in self.layers)

    def active_weights(self, layer: LayerSpec) -> int:
        """Numbers in a layer's matrices that multiply one token."""
        projected = (2 * layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
        routed = 0 if layer.moe is None else layer.moe.num_experts + layer.moe.has_shared
        return self.hidden_size * (projected + 3 * layer.active_size + routed)

    def digest(self) -> bytes:
        """Hash of all fields that change the computation: all but the end tokens and how weights are stored.

        How they are stored is in the fingerprint of the weights. Fields are named as in the first version, later ones
        are left out where they have their defaults: else an update would change the fingerprints of unchanged models,
        and the workers of a cluster that is being updated could not exchange KV.
        """
        first, rope = self.layers[0], next(found for found in self.ropes if found is not None)
        values = {
            "architecture": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_layers": self.num_layers,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.norm.eps,
            "rope": {name: getattr(rope, name) for name in _LEGACY_ROPE},
            "qkv_bias": first.qkv_bias,
            "output_bias": first.output_bias,
            "mlp_bias": first.mlp_bias,
            "qk_norm": first.qk_norm is not None,
            "tie_embeddings": self.tie_embeddings,
            "layer_windows": self.layer_windows,
            **self._later_fields(rope),
        }
        text = json.dumps(values, sort_keys=True, default=_json_value)
        return hashlib.sha256(text.encode()).digest()

    def _later_fields(self, rope: RopeConfig) -> dict[str, Any]:
        """Fields that the first version did not have, where they have other values than its models."""
        found: dict[str, Any] = {}
        if norm := _other_than_default(self.norm, frozenset({"eps"})):
            found["norm"] = norm
        for name in ("embedding_scale", "rounds_embedding_scale", "logit_scale", "logit_cap"):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                found[name] = getattr(self, name)
        layers = [_other_than_default(layer, _LEGACY_LAYER) for layer in self.layers]
        if any(layers):
            found["layers"] = layers
        if len(self.ropes) > 1 or _other_than_default(rope, frozenset(_LEGACY_ROPE)):
            found["ropes"] = [None if layer.rope is None else asdict(layer.rope) for layer in self.layers]
        if self.layers[0].qk_norm not in (None, QKNorm.HEAD):
            found["qk_norm_kind"] = self.layers[0].qk_norm
        return found


def _shared(layer: LayerSpec) -> tuple[Any, ...]:
    """What all layers of a model must have alike."""
    heads = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.score_scale, layer.soft_cap, layer.qk_norm)
    return (*heads, layer.intermediate_size)


def _other_than_default(spec: Any, without: frozenset[str]) -> Mapping[str, Any]:
    return {
        one.name: getattr(spec, one.name)
        for one in fields(spec)
        if one.name not in without and getattr(spec, one.name) != one.default
    }


def _json_value(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, MoeSpec):
        return asdict(value)
    raise ConfigError(f"cannot digest {type(value).__name__}")
