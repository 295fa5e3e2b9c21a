"""From a model directory to a Decoder: each stored tensor is copied, and cast, once, into its final place."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.kv_cache import TORCH_DTYPES
from engine.layers.linear import Linear
from engine.layers.norm import HeadNorm, RMSNorm
from engine.model_config import ModelConfig, load_model_config
from engine.model_files import ModelDirectory
from engine.models.decoder import Decoder, DecoderLayer
from engine.weights import Checkpoint
from tandem.errors import ConfigError

Progress = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""


def load_model(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> Decoder:
    """Load a Hugging Face model directory to compute in `dtype` on `device`.

    Raises ConfigError for everything that is wrong with the directory: configuration, files, shapes, values.
    """
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(TORCH_DTYPES)}, is {dtype!r:.40}")
    config = load_model_config(path)
    with Checkpoint(ModelDirectory(path)) as checkpoint:
        return _Loader(config, checkpoint, TORCH_DTYPES[dtype], torch.device(device), progress).model()


class _Loader:
    """Names the tensors of the architecture, checks all their shapes, then fills parameters."""

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._done = 0
        self._shapes = expected_shapes(config)

    def model(self) -> Decoder:
        config = self._config
        self._check()
        embeddings = self._fill("model.embed_tokens.weight")
        head = embeddings if config.tie_embeddings else self._fill("lm_head.weight")
        layers = [self._layer(f"model.layers.{i}.") for i in range(config.num_layers)]
        return Decoder(
            config,
            embeddings=embeddings,
            layers=layers,
            norm=self._norm("model.norm"),
            head=Linear(head),
            fingerprint=self._checkpoint.fingerprint(config),
        )

    def _check(self) -> None:
        for name, shape in self._shapes.items():
            self._checkpoint.require(name, shape)
        ignored = {"lm_head.weight"} if self._config.tie_embeddings else set()
        unknown = sorted(
            name
            for name in self._checkpoint.names - self._shapes.keys() - ignored
            if not name.endswith("rotary_emb.inv_freq")
        )
        if unknown:
            # Ignoring a bias, an adapter or a quantization scale would give a different model without a word.
            raise ConfigError(
                f"checkpoint: {len(unknown)} tensors that {self._config.architecture} with this "
                f"config.json does not have, first {unknown[0]!r:.120}"
            )

    def _layer(self, prefix: str) -> DecoderLayer:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return DecoderLayer(
            attention_norm=self._norm(prefix + "input_layernorm"),
            qkv=self._linear([attention + "q_proj", attention + "k_proj", attention + "v_proj"]),
            head_norm=self._head_norm(attention) if self._config.qk_norm else None,
            output=self._linear([attention + "o_proj"]),
            mlp_norm=self._norm(prefix + "post_attention_layernorm"),
            gate_up=self._linear([mlp + "gate_proj", mlp + "up_proj"]),
            down=self._linear([mlp + "down_proj"]),
        )

    def _linear(self, parts: Sequence[str]) -> Linear:
        has_bias = parts[0] + ".bias" in self._shapes
        bias = self._fill(*(part + ".bias" for part in parts)) if has_bias else None
        return Linear(self._fill(*(part + ".weight" for part in parts)), bias)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(self._fill(name + ".weight"), self._config.rms_norm_eps)

    def _head_norm(self, prefix: str) -> HeadNorm:
        config = self._config
        query = self._fill(prefix + "q_norm.weight").expand(config.num_heads, -1)
        key = self._fill(prefix + "k_norm.weight").expand(config.num_kv_heads, -1)
        return HeadNorm(torch.cat((query, key)), config.rms_norm_eps)

    def _fill(self, *names: str) -> Tensor:
        """One parameter from tensors stacked along their first dimension."""
        shapes = [self._shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        parameter = torch.empty((rows, *shapes[0][1:]), dtype=self._dtype, device=self._device)
        begin = 0
        for name, shape in zip(names, shapes, strict=True):
            part = parameter[begin : begin + shape[0]]
            part.copy_(self._checkpoint.tensor(name))
            low, high = torch.aminmax(part)
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise ConfigError(f"checkpoint: {name} has values that are not finite in {self._dtype}")
            begin += shape[0]
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, len(self._shapes))
        return parameter


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the architecture reads from a checkpoint, in Hugging Face's names, with its shape."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
    projections = (
        ("self_attn.q_proj", query, hidden, config.qkv_bias),
        ("self_attn.k_proj", key, hidden, config.qkv_bias),
        ("self_attn.v_proj", key, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, query, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    norms = [("input_layernorm", hidden), ("post_attention_layernorm", hidden)]
    if config.qk_norm:
        norms += [("self_attn.q_norm", head_dim), ("self_attn.k_norm", head_dim)]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms}
        for name, rows, columns, has_bias in projections:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    return shapes
