"""What follows the pooling in an embedding model, or the last token's state in a classifier: small linear layers.

They are computed on the host in float32 by the process that has the pooled states (rank 0), many vectors together: for
each on its own the weights would have to be read again.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model.checkpoints.safetensors_files import Checkpoint, SafetensorsFile
from engine.model.files import ModelDirectory
from tandem.errors import ConfigError
from tandem.pooling_model import DenseLayer, PoolingModel, PoolingTask, read_pooling_model

SCORE_WEIGHT = "score.weight"
"""The classification head in a checkpoint, `[num_labels, hidden_size]`."""
_WEIGHTS = "model.safetensors"
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda values: values,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Linear:
    weight: Tensor  # float32 [out_features, in_features]
    bias: Tensor | None = None  # float32 [out_features]
    activation: str = "identity"
    has_residual: bool = False
    residual: Tensor | None = None  # float32 [out_features, in_features]; None: the input itself

    def __call__(self, values: Tensor) -> Tensor:
        out = _ACTIVATIONS[self.activation](F.linear(values, self.weight, self.bias))
        if not self.has_residual:
            return out
        return out + (values if self.residual is None else F.linear(values, self.residual))


class PoolingHead:
    """A model's layers behind the pooling."""

    def __init__(self, layers: Sequence[_Linear]) -> None:
        self._layers = layers

    def __call__(self, vectors: Sequence[Sequence[float]]) -> "list[array[float]]":
        """Compute what the layers make of pooled vectors, `[num_vectors, in_features]`. Takes up to seconds."""
        with torch.inference_mode():
            values = torch.tensor(vectors, dtype=torch.float32)
            for layer in self._layers:
                values = layer(values)
            return [array("f", row.tobytes()) for row in values.numpy()]


def load_pooling_head(path: str | Path, hidden_size: int) -> PoolingHead | None:
    """Load the layers behind a model's pooling; None: it has none, or is none of these models.

    Raises ConfigError for weights that are missing, damaged or of other shapes than `modules.json` and `config.json`
    say.
    """
    directory = ModelDirectory(path)
    pooling = read_pooling_model(directory.root)
    if pooling is None:
        return None
    if pooling.task is PoolingTask.CLASSIFY:
        return PoolingHead([_score(directory, pooling, hidden_size)])
    if pooling.task is PoolingTask.EMBED:
        _check_width(pooling, hidden_size)
    return PoolingHead([_dense(directory, layer) for layer in pooling.dense]) if pooling.dense else None


def _check_width(pooling: PoolingModel, hidden_size: int) -> None:
    if pooling.pooled_size != hidden_size * len(pooling.modes):
        size = pooling.pooled_size // len(pooling.modes)
        raise ConfigError(f"the pooling's word_embedding_dimension is {size}, the model's hidden_size {hidden_size}")


def _score(directory: ModelDirectory, pooling: PoolingModel, hidden_size: int) -> _Linear:
    with Checkpoint(directory) as checkpoint:
        checkpoint.require(SCORE_WEIGHT, (pooling.num_labels, hidden_size))
        return _Linear(weight=_finite(SCORE_WEIGHT, checkpoint.tensor(SCORE_WEIGHT)))


def _dense(directory: ModelDirectory, layer: DenseLayer) -> _Linear:
    file = SafetensorsFile.mapped(directory.resolve_in(layer.folder, _WEIGHTS))
    try:
        shape: tuple[int, ...] = (layer.out_features, layer.in_features)
        wanted = {"linear.weight": shape}
        if layer.has_bias:
            wanted["linear.bias"] = shape[:1]
        if layer.has_residual and layer.in_features != layer.out_features:
            wanted["residual.weight"] = shape
        entries = {entry.name: entry for entry in file.entries}
        if {name: entry.shape for name, entry in entries.items()} != wanted:
            names = ", ".join(f"{name} {list(shape)}" for name, shape in wanted.items())
            raise ConfigError(f"{layer.folder}/{_WEIGHTS}: must have just {names}")
        found = {name: _finite(f"{layer.folder}: {name}", file.tensor(entry)) for name, entry in entries.items()}
    finally:
        file.close()
    return _Linear(
        weight=found["linear.weight"],
        bias=found.get("linear.bias"),
        activation=layer.activation,
        has_residual=layer.has_residual,
        residual=found.get("residual.weight"),
    )


def _finite(name: str, stored: Tensor) -> Tensor:
    """A copy in float32, of a tensor whose file is about to be unmapped. Raises ConfigError for other values."""
    if not stored.is_floating_point() or not stored.float().isfinite().all():
        raise ConfigError(f"checkpoint: {name} must have finite floats")
    return stored.to(torch.float32, copy=True)
