"""Models without files: random tensors made where they are needed, and tensors held by another program."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.model.decoder import Decoder
from engine.model.loader import build_model
from engine.model.shard import TensorSlice
from engine.model.spec import ModelSpec
from tandem.errors import ConfigError
from tandem_bench.shapes import SHAPES, Shape, random_tensor


class RandomSource:
    """Random tensors of a named shape, each made on the device on demand; see TensorSource."""

    def __init__(self, shape: Shape, *, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._sizes = shape.tensors()
        self._seed = seed
        self._dtype = dtype
        self._device = device
        self.names = frozenset(self._sizes)

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        if self._sizes.get(name) != shape:
            raise ConfigError(f"shape {self._shape.name}: {name} is {self._sizes.get(name)}, wanted {shape}")

    def tensor(self, name: str, part: TensorSlice | None = None) -> Tensor:
        size = self._sizes[name]
        whole = random_tensor(self._shape, name, size, seed=self._seed, dtype=self._dtype, device=self._device)
        return whole if part is None else whole.narrow(part.dim, part.begin, part.end - part.begin)

    def matrix(self, name: str, part: TensorSlice | None = None) -> None: ...

    def forget(self, name: str) -> None: ...

    def fingerprint(self, config: ModelSpec) -> str:
        """Return the fingerprint; different kinds of devices make different numbers from one seed."""
        word = f"{self._shape.name}:{self._seed}:{self._dtype}:{self._device.type}".encode()
        return hashlib.sha256(config.digest() + word).hexdigest()[:32]


class HeldSource:
    """Tensors by name that someone else holds, such as a transformers model; see TensorSource."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.names = frozenset(tensors)

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._tensors.get(name)
        if found is None or tuple(found.shape) != shape:
            raise ConfigError(f"{name} is {'missing' if found is None else list(found.shape)}, wanted {list(shape)}")

    def tensor(self, name: str, part: TensorSlice | None = None) -> Tensor:
        whole = self._tensors[name].detach()
        return whole if part is None else whole.narrow(part.dim, part.begin, part.end - part.begin)

    def matrix(self, name: str, part: TensorSlice | None = None) -> None: ...

    def forget(self, name: str) -> None:
        """Do nothing, as the tensors belong to someone else."""

    def fingerprint(self, config: ModelSpec) -> str:
        digest = hashlib.sha256(config.digest())
        for name in sorted(self._tensors):
            digest.update(name.encode() + self._tensors[name].detach().float().cpu().numpy().tobytes())
        return digest.hexdigest()[:32]


def random_model(shape: str, *, seed: int, options: BackendOptions) -> Decoder:
    """Build a named shape on the backend that serves `options`. Raises ConfigError."""
    found = SHAPES.get(shape)
    if found is None:
        raise ConfigError(f"unknown shape {shape!r:.40}: expected one of {', '.join(SHAPES)}")
    source = RandomSource(found, seed=seed, dtype=getattr(torch, options.dtype), device=options.device)
    return build_model(found.model_config(options.dtype), source, backend=select_backend(options))
