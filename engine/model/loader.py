"""Loads a Decoder from a model directory: each stored tensor is copied, and cast, once, into its final place.

A rank of several reads only its own parts of the tensors, except for the fingerprint's samples. Of a quantized matrix
it reads the whole, which is small, and restores its part.
"""

import logging
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from engine.kv_storage.free_memory import return_freed_memory
from engine.model.backend import Backend, Closing, Embedding, Norm, Projection, ProjectionRole
from engine.model.checkpoints.sources import TensorSource, open_source
from engine.model.config import ModelArchitecture, load_model_config
from engine.model.decoder import Decoder, DecoderLayer, DecoderWeights
from engine.model.files import ModelDirectory
from engine.model.layers.norm import HeadNorm
from engine.model.parallel_group import ParallelGroup, SoloGroup
from engine.model.parallel_layers import GatheredHead, RowParallel, VocabParallelEmbedding
from engine.model.shard import Shard
from tandem.errors import ConfigError

_log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
"""Called with the numbers of values loaded so far and in all, of this rank."""


def load_model(
    path: str | Path,
    *,
    backend: Backend,
    progress: Progress | None = None,
    group: ParallelGroup | None = None,
) -> Decoder:
    """Load a Hugging Face model directory for `backend`.

    `group`: the ranks that share the model, of which this process loads its part. Raises ConfigError for every
    fault of the directory: in configuration, files, shapes or values.
    """
    config, directory = load_model_config(path), ModelDirectory(path)
    is_first = group is None or group.rank == 0
    if is_first:
        _warn_about_code(directory)
    with open_source(directory, config, expected_shapes(config), dtype=backend.dtype) as source:
        if is_first and (summary := source.summary) is not None:
            _log.info("%s", summary)
        model = build_model(config, source, backend=backend, progress=progress, group=group)
    return_freed_memory()  # freed tensors leave holes in the heap, up to a tenth of the weights
    return model


def _warn_about_code(directory: ModelDirectory) -> None:
    """Warn when the checkpoint has Python code, which is never run: the model may have needed its changes."""
    if code := directory.read_json("config.json").get("auto_map"):
        names = ", ".join(map(str, code)) if isinstance(code, dict) else type(code).__name__
        _log.warning("config.json: auto_map (%.200s) is ignored: a checkpoint's own code is never run", names)


def build_model(
    config: ModelArchitecture,
    source: TensorSource,
    *,
    backend: Backend,
    progress: Progress | None = None,
    group: ParallelGroup | None = None,
) -> Decoder:
    """Build a Decoder from `source`'s tensors, copied one at a time; see `load_model`. Raises ConfigError."""
    return _Loader(config, source, backend, group or SoloGroup(), progress).model()


class _Loader:
    """Lists the architecture's tensors, checks all their shapes, then fills parameters."""

    def __init__(
        self,
        config: ModelArchitecture,
        source: TensorSource,
        backend: Backend,
        group: ParallelGroup,
        progress: Progress | None,
    ) -> None:
        self._config = config
        self._source = source
        self._backend = backend
        self._group = group
        self._progress = progress
        self._shard = Shard(config, rank=group.rank, size=group.size)
        self._done = 0
        self._shapes = expected_shapes(config)
        self._num_values = sum(prod(self._local_shape(n)) for n in self._shapes if self._shard.holds(n))

    def model(self) -> Decoder:
        config, backend = self._config, self._backend
        self._check()
        embedding, head = self._embedding_and_head()
        layers = [self._layer(f"model.layers.{i}.") for i in range(config.num_layers)]
        weights = DecoderWeights(embedding=embedding, layers=layers, norm=self._norm("model.norm"), head=head)
        fingerprint = self._source.fingerprint(config)
        return Decoder(self._shard.config, weights, backend=backend, fingerprint=fingerprint, group=self._group)

    def _embedding_and_head(self) -> tuple[Embedding, Projection]:
        table = self._table("model.embed_tokens.weight")
        embedding: Embedding
        head: Projection
        if self._config.tie_embeddings:
            embedding, head = self._backend.tied(table)
        else:
            embedding, head = self._backend.embedding(table), self._backend.head(self._table("lm_head.weight"))
        if self._group.size == 1:
            return embedding, head
        rows, first = self._shard.config.vocab_size, self._shard.first_token
        return (
            VocabParallelEmbedding(embedding, self._group, first_token=first, num_tokens=rows),
            GatheredHead(head, self._group, vocab_size=self._config.vocab_size),
        )

    def _check(self) -> None:
        for name, shape in self._shapes.items():
            self._source.require(name, shape)
        ignored = {"lm_head.weight"} if self._config.tie_embeddings else set()
        for i in range(self._config.num_layers):
            ignored |= all_scale_names(f"model.layers.{i}.self_attn.")
        unknown = sorted(
            name
            for name in self._source.names - self._shapes.keys() - ignored
            if not name.endswith("rotary_emb.inv_freq")
        )
        if unknown:
            # Ignoring a bias, an adapter or a quantization scale would silently change the model.
            raise ConfigError(
                f"checkpoint: {len(unknown)} tensors do not belong to {self._config.architecture} with this "
                f"config.json, the first: {unknown[0]!r:.120}"
            )

    def _layer(self, prefix: str) -> DecoderLayer:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        queries_keys_values = self._matrix(attention + "q_proj", attention + "k_proj", attention + "v_proj")
        return DecoderLayer(
            attention_norm=self._norm(prefix + "input_layernorm"),
            qkv=self._backend.projection(*queries_keys_values, ProjectionRole.QKV),
            head_norm=self._head_norm(attention) if self._config.qk_norm else None,
            kv_scales=self._kv_scales(attention),
            output=self._closing(attention + "o_proj", ProjectionRole.OUTPUT),
            mlp_norm=self._norm(prefix + "post_attention_layernorm"),
            gate_up=self._backend.gated(*self._matrix(mlp + "gate_proj", mlp + "up_proj")),
            down=self._closing(mlp + "down_proj", ProjectionRole.DOWN),
        )

    def _closing(self, name: str, role: ProjectionRole) -> Closing:
        weight, bias = self._matrix(name)
        if self._group.size == 1:
            return self._backend.closing(weight, bias, role)
        return RowParallel(self._backend.projection(weight, bias, role), self._group)

    def _matrix(self, *parts: str) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of projections, stacked."""
        has_bias = parts[0] + ".bias" in self._shapes and self._shard.holds(parts[0] + ".bias")
        bias = self._fill(*(part + ".bias" for part in parts)) if has_bias else None
        return self._fill(*(part + ".weight" for part in parts)), bias

    def _norm(self, name: str) -> Norm:
        return self._backend.norm(self._fill(name + ".weight"), self._config.rms_norm_eps)

    def _head_norm(self, prefix: str) -> HeadNorm:
        query, key = self._fill(prefix + "q_norm.weight"), self._fill(prefix + "k_norm.weight")
        return HeadNorm(query, key, self._config.rms_norm_eps)

    def _kv_scales(self, attention: str) -> Tensor | None:
        """Scales of this rank's heads in one layer, float32 `[2, num_kv_heads]`; None without any."""
        names = all_scale_names(attention) & self._source.names
        scales = kv_scales({name: self._source.tensor(name) for name in names}, attention, self._config.num_kv_heads)
        part = self._shard.part(attention + "k_proj.weight")
        if scales is None or part is None:
            return scales if scales is None else scales.to(self._backend.device)
        heads = slice(part.begin // self._config.head_dim, part.end // self._config.head_dim)
        return scales[:, heads].contiguous().to(self._backend.device)

    def _table(self, name: str) -> Tensor:
        """This rank's rows of a table with one row per token; padding of the last ranks' parts is zero."""
        table = self._empty((self._shard.config.vocab_size, self._config.hidden_size))
        num_rows = self._local_shape(name)[0]
        self._copy(name, table[:num_rows])
        table[num_rows:].zero_()
        return table

    def _fill(self, *names: str) -> Tensor:
        """Make one parameter from tensors stacked along their first dimension."""
        shapes = [self._local_shape(name) for name in names]
        parameter = self._empty((sum(shape[0] for shape in shapes), *shapes[0][1:]))
        begin = 0
        for name, shape in zip(names, shapes, strict=True):
            self._copy(name, parameter[begin : begin + shape[0]])
            begin += shape[0]
        return parameter

    def _copy(self, name: str, target: Tensor) -> None:
        """Copy this rank's part of a stored tensor, cast, into `target`. Raises ConfigError for values that are not
        finite.
        """
        if target.numel():
            target.copy_(self._source.tensor(name, self._shard.part(name)))
            low, high = torch.aminmax(target)
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise ConfigError(f"checkpoint: {name} has values that are not finite in {self._backend.dtype}")
        self._source.forget(name)
        self._done += target.numel()
        if self._progress is not None:
            self._progress(self._done, self._num_values)

    def _local_shape(self, name: str) -> tuple[int, ...]:
        part, whole = self._shard.part(name), self._shapes[name]
        return whole if part is None else part.shape(whole)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._backend.dtype, device=self._backend.device)


def expected_shapes(config: ModelArchitecture) -> dict[str, tuple[int, ...]]:
    """Names, as Hugging Face's, and shapes of all tensors that the architecture reads from a checkpoint."""
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


_PLANES = "kv"


def scale_names(attention: str, plane: str) -> tuple[str, str]:
    """Possible names of the scale of `plane`, "k" or "v", in the layer whose attention has this prefix."""
    return f"{attention}{plane}_scale", f"{attention}{plane}_proj.{plane}_scale"


def all_scale_names(attention: str) -> frozenset[str]:
    """Possible names of the K and V scales in the layer whose attention has this prefix."""
    return frozenset(name for plane in _PLANES for name in scale_names(attention, plane))


def kv_scales(stored: Mapping[str, Tensor], attention: str, num_kv_heads: int) -> Tensor | None:
    """Scales of one layer, float32 `[2, num_kv_heads]`, K's first, 1 where only the other is stored; None without any.

    Raises ConfigError for a scale that is not positive and finite, or a number of scales other than 1 or the heads'.
    """
    scales = torch.ones(len(_PLANES), num_kv_heads)
    found = False
    for row, plane in enumerate(_PLANES):
        for name in scale_names(attention, plane):
            if name in stored:
                scales[row] = _checked(name, stored[name], num_kv_heads)
                found = True
    return scales if found else None


def _checked(name: str, stored: Tensor, num_kv_heads: int) -> Tensor:
    scale = stored.to("cpu", torch.float32).flatten()
    if scale.numel() not in (1, num_kv_heads) or not (scale.isfinite() & (scale > 0.0)).all():
        raise ConfigError(
            f"checkpoint: {name} must be one positive number, or one for each of {num_kv_heads} key-value heads"
        )
    return scale.clone()  # the file is unmapped after loading
