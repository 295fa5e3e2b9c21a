"""A model's layers over several ranks: wrappers around each rank's own part."""

import torch
from torch import Tensor

from engine.model.backend import Embedding, Projection
from engine.model.parallel_group import ParallelGroup


class RowParallel:
    """A projection whose input features are split: the ranks' results are summed before they are added; see Closing."""

    __slots__ = ("_group", "_part")

    def __init__(self, part: Projection, group: ParallelGroup) -> None:
        """`part` has the bias on rank 0 only, so that it counts once."""
        self._part = part
        self._group = group

    @property
    def nbytes(self) -> int:
        """Memory of this rank's part."""
        return self._part.nbytes

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """Project this rank's `[num_rows, in_features / size]`. Returns the sum of all ranks, `[num_rows,
        out_features]`.
        """
        return self._group.all_reduce_(self._part(x))


class VocabParallelEmbedding:
    """A table whose rows are split: each rank looks up its own tokens, with zeros for others, and the results are
    summed.
    """

    __slots__ = ("_end", "_first", "_group", "_part")

    def __init__(self, part: Embedding, group: ParallelGroup, *, first_token: int, num_tokens: int) -> None:
        """`part` has the rows of `num_tokens` tokens from `first_token` on."""
        self._part = part
        self._group = group
        self._first = first_token
        self._end = first_token + num_tokens

    @property
    def nbytes(self) -> int:
        """Memory of this rank's part."""
        return self._part.nbytes

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look up int64 `[num_rows]`. Returns `[num_rows, hidden_size]`."""
        elsewhere = (token_ids < self._first) | (token_ids >= self._end)
        rows = self._part((token_ids - self._first).masked_fill_(elsewhere, 0))
        return self._group.all_reduce_(rows.masked_fill_(elsewhere[:, None], 0.0))


class GatheredHead:
    """An output head whose vocabulary is split: rank 0, which samples, gets all logits, other ranks only their own."""

    __slots__ = ("_group", "_part", "_vocab_size")

    def __init__(self, part: Projection, group: ParallelGroup, *, vocab_size: int) -> None:
        """`vocab_size`: of the whole model; the last ranks' parts may be padded beyond it."""
        self._part = part
        self._group = group
        self._vocab_size = vocab_size

    @property
    def nbytes(self) -> int:
        """Memory of this rank's part."""
        return self._part.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Compute logits of `[num_rows, hidden_size]`: float32 `[num_rows, vocab_size]` on rank 0, this rank's
        elsewhere.
        """
        logits = self._part(x)
        parts = self._group.gather(logits)
        return torch.cat(parts, dim=-1)[:, : self._vocab_size].contiguous() if parts else logits
