"""Loads a Decoder from a model directory: each stored tensor is copied, and cast, at most once, into its final place.

A matrix that the backend packs is a view of the file meanwhile, one that it keeps as it is stored is not restored. A
rank of several reads only its own parts of the tensors, except for the fingerprint's samples. Of a quantized matrix it
reads the whole, which is small, and takes its part; of one that is quantized here, all that its part's scales are of.
"""

import logging
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from engine.adapters.packing import site_number
from engine.model.backend import Backend, Closing, Embedding, Norm, Projection, ProjectionRole
from engine.model.checkpoints.on_load import WeightScheme
from engine.model.checkpoints.sources import TensorSource, open_source
from engine.model.checkpoints.stored_matrix import StoredMatrix, Weight, join, stack
from engine.model.config import load_model_config
from engine.model.decoder import Decoder, DecoderLayer, DecoderWeights
from engine.model.files import ModelDirectory
from engine.model.layers.composed import AdaptedClosing, AdaptedProjection, NormedClosing, NormedQKV, ScaledEmbedding
from engine.model.layers.norm import HeadNorm, RowNorm, SplitRowNorm
from engine.model.parallel_group import ParallelGroup, SoloGroup
from engine.model.parallel_layers import GatheredHead, RowParallel, VocabParallelEmbedding
from engine.model.parameters import LAYERS, StoredPart, expected_shapes, parameter_table
from engine.model.pooling_head import SCORE_WEIGHT
from engine.model.shard import Shard, TensorSlice
from engine.model.spec import LayerSpec, ModelSpec, MoeSpec, NormKind, QKNorm
from tandem.errors import ConfigError
from tandem.pooling_model import CLASSIFIER
from tandem.process.host_memory import return_freed_memory

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
    if is_first and (scheme := backend.quantizes_to) is not None:
        _log.info("%d matrices are quantized as %s, and multiplied so", model.num_kept, scheme.value)
    elif is_first and model.num_kept:
        _log.info("but %d matrices are multiplied as they are stored", model.num_kept)
    return_freed_memory()  # freed tensors leave holes in the heap, up to a tenth of the weights
    return model


def _warn_about_code(directory: ModelDirectory) -> None:
    """Warn when the checkpoint has Python code, which is never run: the model may have needed its changes."""
    if code := directory.read_json("config.json").get("auto_map"):
        names = ", ".join(map(str, code)) if isinstance(code, dict) else type(code).__name__
        _log.warning("config.json: auto_map (%.200s) is ignored: a checkpoint's own code is never run", names)


def build_model(
    config: ModelSpec,
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
        config: ModelSpec,
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
        self._adapters = backend.adapters()
        self._shard = Shard(config, rank=group.rank, size=group.size)
        self._done = 0
        self._kept_names: set[str] = set()
        self._viewed: set[str] = set()
        """Tensors that a backend may still be reading in the file."""
        self._table = parameter_table(config)
        parts = (part for parts in self._table.values() for part in parts if self._shard.holds(part))
        self._num_values = sum(prod(self._local_shape(part)) for part in parts)

    def model(self) -> Decoder:
        config, backend = self._config, self._backend
        self._check()
        embedding, head = self._embedding_and_head()
        layers = [self._layer(i, layer) for i, layer in enumerate(config.layers)]
        self._release_views()
        weights = DecoderWeights(embedding=embedding, layers=layers, norm=self._norm("norm"), head=head)
        fingerprint = self._source.fingerprint(config)
        return Decoder(
            self._shard.config,
            weights,
            backend=backend,
            fingerprint=fingerprint,
            group=self._group,
            num_kept=len(self._kept_names),
            adapters=self._adapters,
        )

    def _embedding_and_head(self) -> tuple[Embedding, Projection]:
        is_tied = self._config.tie_embeddings
        table = self._vocabulary("embedding", is_matrix=is_tied)
        embedding: Embedding
        head: Projection
        if is_tied:
            embedding, head = self._backend.tied(table)
        else:
            embedding = self._backend.embedding(table)
            head = self._backend.head(self._vocabulary("head", is_matrix=True))
        if self._config.logit_cap is not None:
            head = self._backend.soft_capped(head, self._config.logit_cap)
        if self._group.size > 1:
            rows, first = self._shard.config.vocab_size, self._shard.first_token
            embedding = VocabParallelEmbedding(embedding, self._group, first_token=first, num_tokens=rows)
            head = GatheredHead(head, self._group, vocab_size=self._config.vocab_size)
        if self._config.embedding_scale != 1.0:
            scale = self._config.embedding_scale
            if self._config.rounds_embedding_scale:
                scale = torch.tensor(scale, dtype=self._backend.dtype).item()
            embedding = ScaledEmbedding(embedding, scale)
        return embedding, head

    def _check(self) -> None:
        shapes = expected_shapes(self._config)
        for name, shape in shapes.items():
            self._source.require(name, shape)
        ignored = {"lm_head.weight"} if self._config.tie_embeddings else set()
        if self._config.architecture.endswith(CLASSIFIER):
            ignored.add(SCORE_WEIGHT)  # `engine.model.pooling_head` reads it
        for i in range(self._config.num_layers):
            ignored |= all_scale_names(f"{LAYERS}{i}.self_attn.")
        unknown = sorted(
            name for name in self._source.names - shapes.keys() - ignored if not name.endswith("rotary_emb.inv_freq")
        )
        if unknown:
            # Ignoring a bias, an adapter or a quantization scale would silently change the model.
            raise ConfigError(
                f"checkpoint: {len(unknown)} tensors do not belong to {self._config.architecture} with this "
                f"config.json, the first: {unknown[0]!r:.120}"
            )

    def _layer(self, index: int, spec: LayerSpec) -> DecoderLayer:
        key = f"layers.{index}."
        gate_up, down = self._mlp(key, spec)
        return DecoderLayer(
            qkv=self._qkv(key, spec),
            attention_norm=self._norm(key + "attention_norm"),
            head_norm=self._head_norm(key) if spec.qk_norm is QKNorm.HEAD else None,
            kv_scales=self._kv_scales(f"{LAYERS}{index}.self_attn."),
            output=self._closing(key + "output", key + "attention_output_norm", ProjectionRole.OUTPUT),
            mlp_norm=None if spec.is_parallel else self._norm(key + "mlp_norm", feeds_mixture=spec.moe is not None),
            gate_up=gate_up,
            down=down,
        )

    def _mlp(self, key: str, spec: LayerSpec) -> tuple[Projection | None, Closing]:
        norm_key = key + "mlp_output_norm"
        if spec.moe is not None:
            return None, self._closed(self._mixture(key, spec.moe), norm_key)
        return self._gate_up(key + "gate_up", spec), self._closing(key + "down", norm_key, ProjectionRole.DOWN)

    def _gate_up(self, key: str, spec: LayerSpec) -> Projection:
        weight, bias = self._matrix(key)
        if self._adapters is None:
            return self._backend.gated(weight, bias, spec.activation)
        # Adapters add to gates and what they open before these are multiplied.
        stacked = self._adapted(key, self._backend.projection(weight, bias, ProjectionRole.STACKED))
        return self._backend.gate(stacked, spec.activation, weight.shape[0] // 2)

    def _adapted(self, key: str, projection: Projection) -> Projection:
        return projection if self._adapters is None else AdaptedProjection(projection, self._adapters, _site(key))

    def _mixture(self, key: str, moe: MoeSpec) -> Projection:
        matrices = (
            self._matrix(f"{key}experts.{index}.{name}")[0]
            for index in range(moe.num_experts + moe.has_shared)
            for name in ("gate_up", "down")
        )
        return self._backend.mixture(moe, self._fill(key + "expert_router.weight"), matrices)

    def _qkv(self, key: str, spec: LayerSpec) -> Projection:
        projection = self._backend.projection(*self._matrix(key + "qkv"), ProjectionRole.QKV)
        projection = self._adapted(key + "qkv", projection)
        if spec.qk_norm is None or spec.qk_norm is QKNorm.HEAD:
            return projection
        local = self._shard.config
        return NormedQKV(
            projection,
            self._row_norm(key + "query_norm", spec.qk_norm),
            self._row_norm(key + "key_norm", spec.qk_norm),
            query_size=local.num_heads * local.head_dim,
            key_size=local.num_kv_heads * local.head_dim,
        )

    def _closing(self, key: str, norm_key: str, role: ProjectionRole) -> Closing:
        weight, bias = self._matrix(key)
        if self._group.size == 1 and norm_key + ".weight" not in self._table:
            closing = self._backend.closing(weight, bias, role)
            return closing if self._adapters is None else AdaptedClosing(closing, self._adapters, _site(key))
        return self._closed(self._adapted(key, self._backend.projection(weight, bias, role)), norm_key)

    def _closed(self, part: Projection, norm_key: str) -> Closing:
        """End a block by this rank's part of a projection, summed over the ranks, and normed where the model does."""
        whole = RowParallel(part, self._group)
        if norm_key + ".weight" not in self._table:
            return whole
        norm, row = self._config.norm, self._fill(norm_key + ".weight")[None]
        return NormedClosing(whole, self._backend.row_norm(row, norm.eps, norm.kind))

    def _matrix(self, key: str) -> tuple[Weight, Tensor | None]:
        """Weight and bias of stacked projections; no bias where only another rank adds it."""
        biases = self._table.get(key + ".bias", ())
        has_bias = any(self._shard.holds(part) for part in biases)
        bias = self._fill(key + ".bias") if has_bias else None
        if (scheme := self._backend.quantizes_to) is not None:
            return self._quantized(key + ".weight", scheme), bias
        stored = self._kept(key + ".weight")
        return (self._fill(key + ".weight", is_matrix=True) if stored is None else stored), bias

    def _quantized(self, key: str, scheme: WeightScheme) -> Weight:
        """This rank's parts, quantized: as one matrix if the backend takes it so, else restored from the codes."""
        parts = [part for part in self._table[key] if self._shard.holds(part)]
        self._release_views()
        whole = stack([self._quantized_part(part, scheme) for part in parts])
        if not self._backend.keeps(whole):
            return whole.dequantized(self._backend.dtype).to(self._backend.device)
        self._kept_names |= {part.name for part in parts}
        return whole

    def _quantized_part(self, part: StoredPart, scheme: WeightScheme) -> StoredMatrix:
        """This rank's part of a quantized matrix. Raises ConfigError for values that are not finite."""
        cut = self._shard.slice(part)
        read = scheme.needed(part.shape, cut)
        values = _restored(part, self._source.tensor(part.name, read))
        try:
            matrix = scheme.quantize(values)
        except ConfigError as error:
            raise ConfigError(f"checkpoint: {part.name} {error}") from None
        self._source.forget(part.name)
        self._advance(prod(self._local_shape(part)))
        if cut is None or read == cut:
            return matrix
        first = 0 if read is None else read.begin
        return matrix.part(TensorSlice(dim=cut.dim, begin=cut.begin - first, end=cut.end - first))

    def _kept(self, key: str) -> StoredMatrix | None:
        """This rank's stored parts as one matrix, if the backend keeps it so."""
        parts = [part for part in self._table[key] if self._shard.holds(part)]
        if not self._backend.keeps_stored or not all(part.is_as_stored for part in parts):
            return None
        self._release_views()
        found = []
        for part in parts:
            matrix = self._source.matrix(part.name, self._shard.slice(part))
            if matrix is None or not self._backend.keeps(matrix):
                return None
            if not matrix.has_finite_codes():
                raise ConfigError(f"checkpoint: {part.name} has codes that are not finite")
            found.append(matrix)
        whole = join(found)
        if whole is None or not self._backend.keeps(whole):
            return None
        names = {part.name for part in parts}
        self._viewed |= names
        self._kept_names |= names
        for part in parts:
            self._advance(prod(self._local_shape(part)))
        return whole

    def _norm(self, key: str, *, feeds_mixture: bool = False) -> Norm:
        if key + ".weight" not in self._table:
            return self._backend.no_norm(self._config.hidden_size)
        bias = self._fill(key + ".bias") if key + ".bias" in self._table else None
        weight = self._fill(key + ".weight")
        return self._backend.norm(self._config.norm, weight, bias, feeds_mixture=feeds_mixture)

    def _head_norm(self, key: str) -> HeadNorm:
        return HeadNorm(self._fill(key + "query_norm"), self._fill(key + "key_norm"), self._config.norm.eps)

    def _row_norm(self, key: str, kind: QKNorm) -> RowNorm:
        weight, eps = self._fill(key), self._config.norm.eps
        if kind is QKNorm.HEAD_LAYER:
            return self._backend.row_norm(weight.view(-1, self._config.head_dim), eps, NormKind.LAYER)
        if self._group.size > 1:
            return SplitRowNorm(weight, eps, self._group)
        return self._backend.row_norm(weight[None], eps, NormKind.RMS)

    def _kv_scales(self, attention: str) -> Tensor | None:
        """Scales of this rank's heads in one layer, float32 `[2, num_kv_heads]`; None without any."""
        names = all_scale_names(attention) & self._source.names
        scales = kv_scales({name: self._source.tensor(name) for name in names}, attention, self._config.num_kv_heads)
        if scales is None:
            return None
        first = self._shard.first_kv_head
        return scales[:, first : first + self._shard.config.num_kv_heads].contiguous().to(self._backend.device)

    def _vocabulary(self, key: str, *, is_matrix: bool) -> Tensor:
        """This rank's rows of a table with one row per token; padding of the last ranks' parts is zero."""
        (part,) = self._table[key]
        num_rows = self._local_shape(part)[0]
        if is_matrix and num_rows == self._shard.config.vocab_size and (view := self._view(part)) is not None:
            return view
        table = self._empty((self._shard.config.vocab_size, self._config.hidden_size))
        self._copy(part, table[:num_rows])
        table[num_rows:].zero_()
        return table

    def _fill(self, key: str, *, is_matrix: bool = False) -> Tensor:
        """Make one parameter from this rank's stored parts, stacked along their first dimension."""
        parts = [part for part in self._table[key] if self._shard.holds(part)]
        if is_matrix and len(parts) == 1 and (view := self._view(parts[0])) is not None:
            return view
        shapes = [self._local_shape(part) for part in parts]
        parameter = self._empty((sum(shape[0] for shape in shapes), *shapes[0][1:]))
        begin = 0
        for part, shape in zip(parts, shapes, strict=True):
            self._copy(part, parameter[begin : begin + shape[0]])
            begin += shape[0]
        return parameter

    def _copy(self, part: StoredPart, target: Tensor) -> None:
        """Copy this rank's part of a stored tensor, cast, into `target`. Raises ConfigError for values that are not
        finite.
        """
        if target.numel():
            target.copy_(_restored(part, self._source.tensor(part.name, self._shard.slice(part))))
            self._check_finite(part, target)
        self._source.forget(part.name)
        self._advance(target.numel())

    def _view(self, part: StoredPart) -> Tensor | None:
        """A part as it lies in the file, for a backend that packs it before the next one is read: a copy of the
        largest would be the peak of all memory. None where it has to be copied.
        """
        if not (self._backend.packs_matrices and part.is_as_stored):
            return None
        self._release_views()
        stored = self._source.tensor(part.name, self._shard.slice(part))
        if stored.dtype != self._backend.dtype or not stored.is_contiguous() or not stored.numel():
            return None
        self._check_finite(part, stored)
        self._viewed.add(part.name)
        self._advance(stored.numel())
        return stored

    def _release_views(self) -> None:
        for name in self._viewed:
            self._source.forget(name)
        self._viewed.clear()

    def _check_finite(self, part: StoredPart, values: Tensor) -> None:
        low, high = torch.aminmax(values)
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise ConfigError(f"checkpoint: {part.name} has values that are not finite in {self._backend.dtype}")

    def _advance(self, num_values: int) -> None:
        self._done += num_values
        if self._progress is not None:
            self._progress(self._done, self._num_values)

    def _local_shape(self, part: StoredPart) -> tuple[int, ...]:
        found = self._shard.slice(part)
        return part.shape if found is None else found.shape(part.shape)

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=self._backend.dtype, device=self._backend.device)


def _site(key: str) -> int:
    """Number of a projection, `layers.3.qkv`, for adapters."""
    _, layer, name = key.split(".")
    return site_number(int(layer), name)


def _restored(part: StoredPart, stored: Tensor) -> Tensor:
    """What kernels compute with, from what is stored; see `engine.model.parameters`."""
    if part.order is not None:
        heads = stored.reshape(-1, len(part.order), *stored.shape[1:])
        stored = heads[:, list(part.order)].flatten(0, 1)
    if part.offset or part.factor != 1.0:
        stored = (stored.float() + part.offset) * part.factor
    return stored


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
