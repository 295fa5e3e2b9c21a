"""The parameter table of a model: for every parameter, the stored tensors that it is made of, and how ranks share them.

Loader, shards, checkpoint readers and the arithmetic of memory read it; a family changes names and switches only. What
a checkpoint stores in another form than kernels compute with is described here, and undone once, while it is copied:
norms stored without their 1, and rotated pairs of elements. Kernels rotate the pairs (i, i + head_dim / 2) of a head;
where a model rotates neighbours, or a part of each head, the rows of its queries and keys are put in an order in which
its pairs are these, and what is not rotated is paired with itself at angle zero. Scores are products over all elements
of a head, so an order that queries and keys share does not change them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from engine.model.rope_config import RopeConfig
from engine.model.spec import LayerSpec, ModelSpec, MoeSpec, NormSpec, QKNorm

LAYERS = "model.layers."
"""Beginning of the names of a layer's tensors."""


class Split(Enum):
    """What ranks divide a parameter by."""

    NONE = "none"
    """Every rank has all of it."""
    HEADS = "heads"
    KV_HEADS = "kv_heads"
    INNER = "inner"
    """The MLP's inner values."""
    EXPERT_INNER = "expert_inner"
    """An expert's inner values."""
    SHARED_INNER = "shared_inner"
    """Inner values of the expert that computes every token."""
    VOCABULARY = "vocabulary"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """A stored tensor, or consecutive rows of one, that a parameter is made of."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole stored tensor."""
    split: Split = Split.NONE
    dim: int = 0
    """The dimension that is divided: rows, or columns of a projection that closes a block."""
    unit: int = 1
    """Rows (or columns) of one head, inner value or token."""
    num_units: int = 0
    """Number of them in this part; 0 where nothing is divided."""
    first_unit: int = 0
    """Number of the first of them among those of the model: where each head has a tensor."""
    begin: int = 0
    """First row of the stored tensor that belongs to the parameter."""
    order: tuple[int, ...] | None = None
    """For each row of a head, its place in the checkpoint's; None: the same."""
    offset: float = 0.0
    """Added to stored values."""
    factor: float = 1.0
    """Multiplied with them after that."""
    is_added_once: bool = False
    """A bias that follows a sum over the ranks: only rank 0 has it."""

    @property
    def is_as_stored(self) -> bool:
        """Whether kernels compute with the very rows and values that are stored."""
        return self.order is None and self.offset == 0.0 and self.factor == 1.0


Parts = tuple[StoredPart, ...]


def parameter_table(spec: ModelSpec) -> dict[str, Parts]:
    """For every parameter, by the decoder's name, the parts that are stacked to form it."""
    vocabulary = (spec.vocab_size, spec.hidden_size)
    table: dict[str, Parts] = {"embedding": (_rows("model.embed_tokens.weight", vocabulary, Split.VOCABULARY),)}
    if not spec.tie_embeddings:
        table["head"] = (_rows("lm_head.weight", vocabulary, Split.VOCABULARY),)
    # Logits are linear in the last norm's results, which are few numbers to scale.
    table |= _norm("norm", "model.norm", spec.hidden_size, spec.norm, factor=spec.logit_scale)
    for index, layer in enumerate(spec.layers):
        table |= {
            f"layers.{index}.{name}": tuple(replace(part, name=f"{LAYERS}{index}.{part.name}") for part in parts)
            for name, parts in _layer(spec, layer)
        }
    return table


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors that the model reads from a checkpoint."""
    return {part.name: part.shape for parts in parameter_table(spec).values() for part in parts}


def head_order(rope: RopeConfig | None, head_dim: int) -> tuple[int, ...] | None:
    """For each element of a head in the kernels' order, its place in the checkpoint's; None where they are the same."""
    if rope is None:
        return None
    half, rotated = head_dim // 2, rope.rotary_dim(head_dim)
    pairs = rotated // 2
    low = [2 * i for i in range(pairs)] if rope.is_interleaved else list(range(pairs))
    high = [i + (1 if rope.is_interleaved else pairs) for i in low]
    rest = list(range(rotated, head_dim))
    order = (*low, *rest[: half - pairs], *high, *rest[half - pairs :])
    return None if order == tuple(range(head_dim)) else order


def _layer(spec: ModelSpec, layer: LayerSpec) -> Iterator[tuple[str, Parts]]:
    """The parameters of one layer, their stored names without prefix."""
    names, hidden = spec.names, spec.hidden_size
    yield from _projection("qkv", _qkv(spec, layer), layer.qkv_bias)
    heads = replace(_rows(names.output, (hidden, layer.num_heads * layer.head_dim)), split=Split.HEADS, dim=1)
    output = replace(heads, unit=layer.head_dim, num_units=layer.num_heads)
    yield from _projection("output", (output,), layer.output_bias)
    yield from _mlp(spec, layer) if layer.moe is None else _experts(spec, layer.moe)
    norms = {}
    if layer.has_input_norms:
        norms["attention_norm"] = names.attention_norm
        if not layer.is_parallel:
            norms["mlp_norm"] = names.mlp_norm
    if layer.has_output_norms:
        norms |= {"attention_output_norm": names.attention_output_norm, "mlp_output_norm": names.mlp_output_norm}
    for name, stored in norms.items():
        yield from _norm(name, stored, hidden, spec.norm).items()
    if layer.qk_norm is not None:
        yield "query_norm", _head_norm(names.query_norm, spec.norm, layer, Split.HEADS, layer.num_heads)
        yield "key_norm", _head_norm(names.key_norm, spec.norm, layer, Split.KV_HEADS, layer.num_kv_heads)


def _qkv(spec: ModelSpec, layer: LayerSpec) -> Parts:
    names, size, fused = spec.names, layer.head_dim, spec.names.fused_qkv
    order = head_order(layer.rope, size)
    total = (layer.num_heads + 2 * layer.num_kv_heads) * size
    parts, begin = [], 0
    for name, split, count, of_pairs in (
        (names.queries, Split.HEADS, layer.num_heads, order),
        (names.keys, Split.KV_HEADS, layer.num_kv_heads, order),
        (names.values, Split.KV_HEADS, layer.num_kv_heads, None),
    ):
        shape = (total if fused else count * size, spec.hidden_size)
        part = StoredPart(name=fused or name, shape=shape, split=split, unit=size, num_units=count, order=of_pairs)
        parts.append(replace(part, begin=begin if fused else 0))
        begin += count * size
    return tuple(parts)


def _mlp(spec: ModelSpec, layer: LayerSpec) -> Iterator[tuple[str, Parts]]:
    yield from _projection("gate_up", _gate_up(spec, layer), layer.mlp_bias)
    down = _closing_columns(spec, spec.names.down, layer.intermediate_size, Split.INNER)
    yield from _projection("down", (down,), layer.mlp_bias)


def _experts(spec: ModelSpec, moe: MoeSpec) -> Iterator[tuple[str, Parts]]:
    """Each expert's matrices are parameters of their own; the shared expert counts as one more, after the others."""
    names = spec.names
    routers = [_rows(names.expert_router, (moe.num_experts, spec.hidden_size))]
    experts = [(names.expert.format(expert=i), moe.expert_size, Split.EXPERT_INNER) for i in range(moe.num_experts)]
    if moe.shared_size is not None:
        routers.append(_rows(names.shared_router, (1, spec.hidden_size)))
        experts.append((names.shared_expert, moe.shared_size, Split.SHARED_INNER))
    yield from _projection("expert_router", tuple(routers), has_bias=False)
    for index, (prefix, size, split) in enumerate(experts):
        gates = (
            _rows(f"{prefix}.{name}", (size, spec.hidden_size), split) for name in (names.expert_gate, names.expert_up)
        )
        down = _closing_columns(spec, f"{prefix}.{names.expert_down}", size, split)
        yield from _projection(f"experts.{index}.gate_up", tuple(gates), has_bias=False)
        yield from _projection(f"experts.{index}.down", (down,), has_bias=False)


def _closing_columns(spec: ModelSpec, name: str, size: int, split: Split) -> StoredPart:
    """A projection from `size` inner values, by which it is divided."""
    return replace(_rows(name, (spec.hidden_size, size)), split=split, dim=1, num_units=size)


def _gate_up(spec: ModelSpec, layer: LayerSpec) -> Parts:
    inner, fused = layer.intermediate_size, spec.names.fused_gate_up
    parts = [
        _rows(name, (2 * inner if fused else inner, spec.hidden_size), Split.INNER)
        for name in (fused or spec.names.gate, fused or spec.names.up)
    ]
    return tuple(replace(part, num_units=inner, begin=inner * i if fused else 0) for i, part in enumerate(parts))


def _projection(name: str, parts: Parts, has_bias: bool) -> Iterator[tuple[str, Parts]]:
    yield f"{name}.weight", tuple(replace(part, name=f"{part.name}.weight") for part in parts)
    if has_bias:
        biases = (replace(part, name=f"{part.name}.bias", shape=part.shape[:1]) for part in parts)
        yield f"{name}.bias", tuple(_added_once(part) if part.dim else part for part in biases)


def _added_once(part: StoredPart) -> StoredPart:
    return replace(part, split=Split.NONE, dim=0, num_units=0, is_added_once=True)


def _norm(name: str, stored: str, size: int, norm: NormSpec, factor: float = 1.0) -> dict[str, Parts]:
    weight = StoredPart(name=f"{stored}.weight", shape=(size,), offset=norm.weight_offset, factor=factor)
    found: dict[str, Parts] = {f"{name}.weight": (weight,)}
    if norm.has_bias:
        found[f"{name}.bias"] = (StoredPart(name=f"{stored}.bias", shape=(size,), factor=factor),)
    return found


def _head_norm(name: str, norm: NormSpec, layer: LayerSpec, split: Split, count: int) -> Parts:
    size, order = layer.head_dim, head_order(layer.rope, layer.head_dim)
    one = StoredPart(name=f"{name}.weight", shape=(size,), order=order, offset=norm.weight_offset)
    if layer.qk_norm is QKNorm.HEAD:
        return (one,)
    if layer.qk_norm is QKNorm.PROJECTION:
        return (replace(one, shape=(count * size,), split=split, unit=size, num_units=count),)
    owned = replace(one, split=split, unit=size, num_units=1)
    return tuple(replace(owned, name=f"{name.format(head=i)}.weight", first_unit=i) for i in range(count))


def _rows(name: str, shape: tuple[int, ...], split: Split = Split.NONE) -> StoredPart:
    return StoredPart(name=name, shape=shape, split=split, num_units=shape[0] if split is not Split.NONE else 0)
