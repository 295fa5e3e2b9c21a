"""Attention of a model whose windowed layers are kept apart: one backend for each group of layers, over one pool.

To its backend a group is a model of fewer layers, with block tables of its own (`engine.types.step_inputs`), so that no
kernel knows of groups.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from torch import Tensor

from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.layers.attention import AttentionBackend, AttentionPlan, AttentionSpec
from engine.types.step_inputs import StepInputs

B = TypeVar("B", bound=AttentionBackend)
P = TypeVar("P", bound=AttentionPlan)


class GroupedAttention(Generic[B]):
    """Implements AttentionBackend."""

    def __init__(
        self, spec: AttentionSpec, cache: PagedKVCache, make: Callable[[AttentionSpec, PagedKVCache], B]
    ) -> None:
        """`make`: makes the backend of one group's layers."""
        groups = cache.layout.groups
        self.backends = tuple(make(_spec_of(spec, layers), cache.group(i)) for i, layers in enumerate(groups))
        places = {layer: (i, at) for i, layers in enumerate(groups) for at, layer in enumerate(layers)}
        self._places = tuple(places[layer] for layer in range(len(places)))

    def plan(self, inputs: StepInputs) -> "GroupedPlan[AttentionPlan]":
        plans = [backend.plan(inputs.of_group(i)) for i, backend in enumerate(self.backends)]
        return GroupedPlan(plans, self._places)


class GroupedPlan(Generic[P]):
    """One step's attention, by group."""

    __slots__ = ("_places", "plans")

    def __init__(self, plans: Sequence[P], places: Sequence[tuple[int, int]]) -> None:
        self.plans = plans
        self._places = places

    def attend(self, layer: int, qkv: Tensor) -> Tensor:
        group, at = self._places[layer]
        return self.plans[group].attend(at, qkv)


def attention_of_groups(
    spec: AttentionSpec, cache: PagedKVCache, make: Callable[[AttentionSpec, PagedKVCache], B]
) -> B | GroupedAttention[B]:
    """The backend that `make` makes, or one for each group where windowed layers are kept apart."""
    return GroupedAttention(spec, cache, make) if cache.layout.windowed_layers else make(spec, cache)


def _spec_of(spec: AttentionSpec, layers: tuple[int, ...]) -> AttentionSpec:
    """The properties of some layers' attention, numbered from 0."""
    ropes = tuple(dict.fromkeys(spec.rope_of_layer[layer] for layer in layers))
    return replace(
        spec,
        config=replace(spec.config, layers=tuple(spec.config.layers[layer] for layer in layers)),
        ropes=tuple(spec.ropes[rope] for rope in ropes),
        rope_of_layer=tuple(ropes.index(spec.rope_of_layer[layer]) for layer in layers),
        head_norms=None if spec.head_norms is None else tuple(spec.head_norms[layer] for layer in layers),
        kv_scales=None if spec.kv_scales is None else spec.kv_scales[list(layers)],
    )
