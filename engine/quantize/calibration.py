"""Runs a model over example tokens, one layer at a time, and measures the inputs of each projection.

Of the whole model only one layer is in memory, with the hidden states of all examples before it. A layer is a Decoder
of its own, with a backend that measures: so every family is computed by the code that serves it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from engine.backends.plain_torch import TorchBackend
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.backend import ProjectionRole
from engine.model.checkpoints.safetensors_files import Checkpoint
from engine.model.checkpoints.stored_matrix import Weight, as_tensor
from engine.model.layers.linear import GatedLinear, HeadLinear, Linear, TokenEmbedding
from engine.model.loader import build_model
from engine.model.memory_budget import kv_layout
from engine.model.parameters import LAYERS, expected_shapes
from engine.model.shard import TensorSlice
from engine.model.spec import Activation, ModelSpec
from engine.types.step_inputs import StepInputs
from tandem.errors import ConfigError

_EMBEDDING = "model.embed_tokens.weight"
_FIRST_LAYER = f"{LAYERS}0."
_PARAMETERS = {ProjectionRole.QKV: "qkv", ProjectionRole.OUTPUT: "output", ProjectionRole.DOWN: "down"}
_GATE_UP = "gate_up"


@dataclass(slots=True)
class InputStatistics:
    """What is measured of a projection's inputs, whose rows are `[columns]`."""

    largest: Tensor
    """Largest magnitude of each column, float32 `[columns]`."""
    gram: Tensor | None
    """Sums over all rows of products of their columns, float32 `[columns, columns]`; None: not measured."""

    @classmethod
    def empty(cls, columns: int, *, with_gram: bool) -> "InputStatistics":
        """Statistics of no rows."""
        return cls(torch.zeros(columns), torch.zeros(columns, columns) if with_gram else None)

    def add(self, x: Tensor) -> None:
        """Add rows, float32 `[num_rows, columns]`."""
        self.largest = torch.maximum(self.largest, x.abs().amax(dim=0))
        if self.gram is not None:
            self.gram.addmm_(x.t(), x)


class CalibratedModel:
    """A dense checkpoint whose layers are run in order over example tokens, in float32 on the CPU."""

    def __init__(self, spec: ModelSpec, checkpoint: Checkpoint, chunks: Sequence[Sequence[int]]) -> None:
        """`chunks`: token ids of the examples, each the beginning of a sequence of its own. Raises ConfigError for
        token ids that the model does not have, and for an empty example.
        """
        self._spec = spec
        self._checkpoint = checkpoint
        if not chunks or any(not chunk for chunk in chunks):
            raise ConfigError("calibration: every example needs at least one token")
        if any(not 0 <= token < spec.vocab_size for chunk in chunks for token in chunk):
            raise ConfigError(f"calibration: token ids must be below the model's vocab_size {spec.vocab_size}")
        table = checkpoint.tensor(_EMBEDDING)
        self.states = [table[torch.tensor(chunk)].float() * spec.embedding_scale for chunk in chunks]
        """Hidden states of each example before the next layer, float32 `[num_rows, hidden_size]`."""

    def measure(self, index: int, *, with_gram: bool) -> dict[str, InputStatistics]:
        """Statistics of the inputs of a layer's projections, by the parameter table's names in a layer.

        Layers before it must have been passed. Raises ConfigError as the loader.
        """
        backend = _MeasuringBackend(with_gram=with_gram)
        runner = _LayerRunner(self._spec, _LayerSource(self._checkpoint, self._spec, index, {}), index, backend)
        for states in self.states:
            runner.run(states)
        return backend.statistics

    def advance(self, index: int, replaced: Mapping[str, Tensor]) -> None:
        """Pass a layer: the next one is measured with its results. `replaced`: tensors to take instead of the
        checkpoint's, by their names there.
        """
        source = _LayerSource(self._checkpoint, self._spec, index, replaced)
        runner = _LayerRunner(self._spec, source, index, _GivenStatesBackend())
        self.states = [runner.run(states) for states in self.states]


class _GivenStatesBackend(TorchBackend):
    """The reference backend, of a decoder whose embedding returns states that are set before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.states = torch.empty(0)
        """Float32 `[num_rows, hidden_size]`."""

    def tied(self, weight: Tensor) -> tuple[TokenEmbedding, HeadLinear]:
        return _GivenStates(self, weight), HeadLinear(weight)


class _GivenStates(TokenEmbedding):
    """Stands in the embedding's place."""

    __slots__ = ("_backend",)

    def __init__(self, backend: _GivenStatesBackend, weight: Tensor) -> None:
        super().__init__(weight, is_shared=True)
        self._backend = backend

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._backend.states.clone()  # layers add to it in place


class _MeasuringBackend(_GivenStatesBackend):
    """Adds the inputs of all projections of one layer to its statistics."""

    def __init__(self, *, with_gram: bool) -> None:
        super().__init__()
        self._with_gram = with_gram
        self.statistics: dict[str, InputStatistics] = {}

    def projection(self, weight: Weight, bias: Tensor | None, role: ProjectionRole) -> Linear:
        return _MeasuredLinear(as_tensor(weight), bias, self._of(_PARAMETERS[role], weight))

    def gated(self, weight: Weight, bias: Tensor | None, activation: Activation = Activation.SILU) -> GatedLinear:
        return _MeasuredGate(as_tensor(weight), bias, activation, self._of(_GATE_UP, weight))

    def _of(self, name: str, weight: Weight) -> InputStatistics:
        return self.statistics.setdefault(name, InputStatistics.empty(weight.shape[1], with_gram=self._with_gram))


class _MeasuredLinear(Linear):
    """A projection that adds its inputs to statistics."""

    __slots__ = ("_statistics",)

    def __init__(self, weight: Tensor, bias: Tensor | None, statistics: InputStatistics) -> None:
        super().__init__(weight, bias)
        self._statistics = statistics

    def __call__(self, x: Tensor) -> Tensor:
        self._statistics.add(x)
        return super().__call__(x)


class _MeasuredGate(GatedLinear):
    """A gated projection that adds its inputs to statistics."""

    __slots__ = ("_statistics",)

    def __init__(
        self, weight: Tensor, bias: Tensor | None, activation: Activation, statistics: InputStatistics
    ) -> None:
        super().__init__(weight, bias, activation)
        self._statistics = statistics

    def __call__(self, x: Tensor) -> Tensor:
        self._statistics.add(x)
        return super().__call__(x)


class _LayerSource:
    """Implements `sources.TensorSource`: one layer of a checkpoint as the only one of a model, without vocabulary."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, index: int, replaced: Mapping[str, Tensor]) -> None:
        self._checkpoint = checkpoint
        self._prefix = f"{LAYERS}{index}."
        self._replaced = replaced
        self._table = torch.zeros(1, spec.hidden_size)
        self.names = frozenset(expected_shapes(_alone(spec, index)))

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        if name != _EMBEDDING:
            self._checkpoint.require(self._stored(name), shape)

    def tensor(self, name: str, part: TensorSlice | None = None) -> Tensor:
        if name == _EMBEDDING:
            return self._table
        replaced = self._replaced.get(self._stored(name))
        if replaced is None:
            return self._checkpoint.tensor(self._stored(name), part)
        return replaced if part is None else replaced.narrow(part.dim, part.begin, part.end - part.begin)

    def matrix(self, name: str, part: TensorSlice | None = None) -> None:
        """Return None: everything is dense."""

    def forget(self, name: str) -> None:
        if name != _EMBEDDING:
            self._checkpoint.forget(self._stored(name))

    def fingerprint(self, config: ModelSpec) -> str:
        return ""  # nobody exchanges this model's KV

    def _stored(self, name: str) -> str:
        return name.replace(_FIRST_LAYER, self._prefix, 1)


class _LayerRunner:
    """One layer with its attention, for sequences of any lengths."""

    def __init__(self, spec: ModelSpec, source: _LayerSource, index: int, backend: _GivenStatesBackend) -> None:
        """Raises ConfigError, naming the tensor as the whole model has it."""
        self._backend = backend
        try:
            self._decoder = build_model(_alone(spec, index), source, backend=backend)
        except ConfigError as error:
            raise ConfigError(str(error).replace(_FIRST_LAYER, f"{LAYERS}{index}.")) from None

    def run(self, states: Tensor) -> Tensor:
        """What the layer makes of the hidden states of one sequence, `[num_rows, hidden_size]`."""
        decoder, backend = self._decoder, self._backend
        count = len(states)
        # One block holds the sequence, whose rows attend to each other.
        layout = kv_layout(decoder.config, fingerprint="", dtype="float32", block_size=count)
        attention = backend.attention(decoder.attention_spec, PagedKVCache(layout, num_blocks=1))
        backend.states = states
        rows = np.arange(count)
        inputs = StepInputs(
            token_ids=np.zeros(count, dtype=np.int64),
            positions=rows,
            slots=rows,
            tables=np.zeros((1, 1), dtype=np.int64),
            starts=np.zeros(1, dtype=np.int64),
            counts=np.array([count]),
            num_single=int(count == 1),
            sample_rows=rows[-1:],
            block_size=count,
        )
        return decoder.forward(torch.zeros(count, dtype=torch.int64), attention.plan(inputs))


def _alone(spec: ModelSpec, index: int) -> ModelSpec:
    """One layer as a model with a vocabulary of one token and a plain embedding."""
    return replace(
        spec,
        layers=(spec.layers[index],),
        vocab_size=1,
        tie_embeddings=True,
        embedding_scale=1.0,
        logit_scale=1.0,
        logit_cap=None,
    )
