"""The rows of a step whose answers follow grammars: what may come next is found on the host and banned beside it."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from engine.sampling.backend import SamplingKernels
from engine.sampling.token_counts import Put
from engine.types.token_guide import TokenGuide, num_words


class GuidedRows:
    """Made once for as long as some requests stay together: right after a step of the model even small arrays are slow
    to make, since nothing that Python needs is in the processor's caches.
    """

    def __init__(self, guides: Sequence[tuple[int, TokenGuide]], vocab_size: int, put: Put) -> None:
        """`guides`: with their rows, ascending; at least one."""
        self._rows = put(np.array([row for row, _ in guides], dtype=np.int64))
        self._bits = np.zeros((len(guides), num_words(vocab_size)), dtype=np.int32)
        self._guides = [(guide, bits) for (_, guide), bits in zip(guides, self._bits, strict=True)]

    def forbid_(self, logits: Tensor, kernels: SamplingKernels, put: Put) -> None:
        """Leave these rows of float32 `[num_rows, vocab_size]` logits nothing but what may come next."""
        self._bits.fill(0)
        for guide, bits in self._guides:
            guide.allow(bits)
        kernels.forbid_(logits, self._rows, put(self._bits))


def guided_rows(guides: Sequence[TokenGuide | None], vocab_size: int, put: Put) -> GuidedRows | None:
    """Of each row's guide; None when no row has one."""
    found = [(row, guide) for row, guide in enumerate(guides) if guide is not None]
    return GuidedRows(found, vocab_size, put) if found else None
