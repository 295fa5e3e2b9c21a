"""Samples tokens on the CPU in compiled code: `engine.sampling.backend` without intermediate tensors.

With 16 rows of a vocabulary of 65,536 the reference takes a fifth of a whole decode step, nearly all of it for the
integers of the noise and for sorting; here noise stays in registers and cut-offs are found by radix selection.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.kernels.cpu.library import KernelLibrary
from engine.sampling.backend import DrawParams, LogitEdits, choose_by_steps, forbid_by_numpy_
from engine.sampling.token_counts import Penalties


class CpuSampling:
    """Implements SamplingKernels. Its noise differs from the reference by float32 rounding."""

    def __init__(self, library: KernelLibrary, num_threads: int) -> None:
        self._threads = num_threads
        self._argmax = library.function("tandem_argmax", "piipi")
        self._choose_largest = library.function("tandem_choose_largest", "piipi")
        self._forbid = library.function("tandem_forbid", "pippii")
        self._draw = library.function("tandem_draw", "piippppppppi")

    def choose(
        self,
        logits: Tensor,
        params: DrawParams | None,
        *,
        penalties: Penalties | None = None,
        edits: LogitEdits | None = None,
    ) -> Tensor:
        if params is None and penalties is None and edits is None:
            return self._by_rows(self._choose_largest, logits)
        return choose_by_steps(self, logits, params, penalties=penalties, edits=edits)

    def forbid_(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        if not logits.is_contiguous():
            forbid_by_numpy_(logits, rows, bits)
            return
        shape = (logits.data_ptr(), logits.shape[1])
        self._forbid(*shape, rows.data_ptr(), bits.data_ptr(), *bits.shape)

    def argmax(self, logits: Tensor) -> Tensor:
        return self._by_rows(self._argmax, logits)

    def draw(self, logits: Tensor, params: DrawParams) -> Tensor:
        logits = logits.contiguous()
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        cuts = (params.temperature, params.min_p, params.top_p, params.top_k)
        pointers = [column.data_ptr() for column in (*cuts, params.seed, params.position, params.choice)]
        self._draw(logits.data_ptr(), *logits.shape, *pointers, tokens.data_ptr(), self._threads)
        return tokens

    def _by_rows(self, choose: Callable[..., None], logits: Tensor) -> Tensor:
        logits = logits.contiguous()
        tokens = torch.empty(logits.shape[0], dtype=torch.int64)
        choose(logits.data_ptr(), *logits.shape, tokens.data_ptr(), self._threads)
        return tokens
