"""Conditions of every part of the suite: device, size, deadline."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.backends.options import BackendOptions
from tandem_bench.report import Row

JUDGED_SHAPE = "8b"
"""Shape that the speed goals apply to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Result that is not a number: a name, a version, something skipped."""

    name: str
    text: str


Findings = Iterator[Row | Note]
"""Results that a part yields as soon as they are known, so that a part that is stopped keeps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Conditions of one part."""

    device: str
    """Device type: cuda or cpu."""
    shape: str
    """Shape of the random model; see tandem_bench.shapes."""
    seed: int
    deadline_s: float
    """Time on time.monotonic(), which all processes of a machine share, at which the part is killed."""

    @property
    def place(self) -> torch.device:
        """Return the device with its number, as tensors name it."""
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def is_small(self) -> bool:
        """Whether cases are few and small, with Triton's interpreter: on a CPU the suite only checks that it runs."""
        return self.device == "cpu"

    @property
    def is_judged(self) -> bool:
        """Whether the speed goals apply here."""
        return self.device == "cuda" and self.shape == JUDGED_SHAPE

    @property
    def dtype(self) -> str:
        """Dtype of the model whose speed is measured."""
        return "float32" if self.is_small else "bfloat16"

    @property
    def backend_options(self) -> BackendOptions:
        """Options of the measured engine: the device's best; on a CPU, which is not the subject, plain torch."""
        return BackendOptions(device=self.place, dtype=self.dtype, kernels="torch" if self.is_small else "auto")

    @property
    def kernel_dtypes(self) -> tuple[torch.dtype, ...]:
        """Activation dtypes to compare kernels in; the interpreter silently computes bfloat16 wrongly."""
        return (torch.float32, torch.float16) + (() if self.is_small else (torch.bfloat16,))

    def goal(self, least: float) -> float | None:
        """Return a bound where speed goals apply, else None."""
        return least if self.is_judged else None

    @property
    def left_s(self) -> float:
        """Time until the part is stopped."""
        return self.deadline_s - time.monotonic()
