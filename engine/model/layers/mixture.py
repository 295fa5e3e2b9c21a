"""Mixtures of experts in plain operators: the choice of experts by token, and each expert over the rows that chose it.

The reference for compiled mixtures. Shazeer et al., 2017; a softmax over all experts before the choice, as in Mixtral
(Jiang et al., 2024), and an expert that computes every token, as in DeepSeekMoE (Dai et al., 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.backend import Projection
from engine.model.spec import MoeSpec


def route(logits: Tensor, moe: MoeSpec) -> tuple[Tensor, Tensor]:
    """Choose each row's experts by float32 logits, `[num_rows, num_experts]`, or one column more for a shared expert.

    Returns their numbers, int64, and weights, float32, both `[num_rows, slots]`: the most likely first, of equal ones
    the first, then the shared expert, whose number is `num_experts`.
    """
    likely = logits[:, : moe.num_experts].softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    weights, chosen = (found[:, : moe.experts_per_token] for found in likely)
    if moe.normalizes_weights:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if moe.has_shared:
        weights = torch.cat((weights, logits[:, moe.num_experts :].sigmoid()), dim=-1)
        chosen = torch.cat((chosen, torch.full_like(chosen[:, :1], moe.num_experts)), dim=-1)
    return chosen, weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expert:
    """One gated MLP of a mixture."""

    gate_up: Projection  # silu(gate) * up
    down: Projection

    @property
    def nbytes(self) -> int:
        """Memory of the weights."""
        return self.gate_up.nbytes + self.down.nbytes


class ExpertRouter:
    """Multiplies in float32, whatever the rows have."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.float()  # [num_experts, hidden_size]

    @property
    def nbytes(self) -> int:
        """Memory of the weights."""
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Compute float32 logits `[num_rows, num_experts]` of `[num_rows, hidden_size]`."""
        return F.linear(x.float(), self.weight)


class GroupedMixture:
    """A mixture whose experts each compute their rows at once; implements Projection in the role DOWN."""

    __slots__ = ("_experts", "_moe", "_router")

    def __init__(self, moe: MoeSpec, router: Projection, experts: Sequence[Expert]) -> None:
        """`router` returns float32 logits."""
        self._moe = moe
        self._router = router
        self._experts = tuple(experts)

    @property
    def nbytes(self) -> int:
        """Memory of router and experts."""
        return self._router.nbytes + sum(expert.nbytes for expert in self._experts)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute `[num_rows, hidden_size]` of rows of that size."""
        chosen, weights = route(self._router(x), self._moe)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for number in sorted(set(chosen.flatten().tolist())):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            expert = self._experts[number]
            found = expert.down(expert.gate_up(x[rows])).float()
            total.index_add_(0, rows, found * weights[rows, slots, None])  # each row once
        return total.to(x.dtype)
