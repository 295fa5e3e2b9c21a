"""What every part of the suite is told: on what, how large, until when."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.backends.options import BackendOptions
from tandem_bench.report import Row

JUDGED_SHAPE = "8b"
"""The shape that the issue's goals of speed are about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that is not a number: a name, a version, what was left out."""

    name: str
    text: str


Findings = Iterator[Row | Note]
"""What a part yields, each as soon as it is known: a part that is stopped keeps what it has said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The conditions of one part."""

    device: str
    """cuda or cpu."""
    shape: str
    """Of the random model; see tandem_bench.shapes."""
    seed: int
    deadline_s: float
    """On time.monotonic(), which all processes of a machine share; the part is killed then."""

    @property
    def place(self) -> torch.device:
        """The device with its number, as tensors name it."""
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def is_small(self) -> bool:
        """On a CPU everything is run to see that it runs: few and small cases, and Triton's interpreter."""
        return self.device == "cpu"

    @property
    def is_judged(self) -> bool:
        """Whether the goals of speed are about this."""
        return self.device == "cuda" and self.shape == JUDGED_SHAPE

    @property
    def dtype(self) -> str:
        """Of the model whose speed is measured."""
        return "float32" if self.is_small else "bfloat16"

    @property
    def backend_options(self) -> BackendOptions:
        """Of the engine that is measured: the device's best; on a CPU plain torch, the CPU being no subject here."""
        return BackendOptions(device=self.place, dtype=self.dtype, kernels="torch" if self.is_small else "auto")

    @property
    def kernel_dtypes(self) -> tuple[torch.dtype, ...]:
        """Activations that kernels are compared in; the interpreter computes bfloat16 wrongly and silently."""
        return (torch.float32, torch.float16) + (() if self.is_small else (torch.bfloat16,))

    def goal(self, least: float) -> float | None:
        """A bound that holds only where speed is judged."""
        return least if self.is_judged else None

    @property
    def left_s(self) -> float:
        """Until the part is stopped."""
        return self.deadline_s - time.monotonic()
