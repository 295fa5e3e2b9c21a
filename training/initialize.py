"""First weights that already look back and compare.

A small transformer spends most of a short run on a plateau before heads that copy appear. We
start past it: heads of layer 0 look a fixed number of tokens back, heads of layers 1 and 2 look
for an earlier place whose past is like theirs, and their outputs point at the token found there
(compare "mimetic initialization", Trockman and Kolter 2023). Everything stays trainable.
"""

import torch
from torch import Tensor, nn

from training.model import Attention, LlamaModel, ModelConfig

_STD = 0.04
_OFFSETS = (1, 2, 3, 4, 5, 6, 1, 3)
"""How far back every query head of layer 0 looks."""

_COMPARED = ((None, 0), (0, 1), (2, 2), (3, 3))
"""Per key-value head of layers 1 and 2: the heads of layer 0 whose findings are compared, on the
query side and on the key side; None stands for the token itself."""


@torch.no_grad()
def initialize(model: LlamaModel, config: ModelConfig) -> None:
    """Fill all parameters from torch's global generator."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=_STD / (4 if residual else 1))
    # A direction that all tokens share lets a head look at positions whatever the tokens are.
    shared = torch.randn(config.hidden_size).sign() * _STD
    model.model.embed_tokens.weight += shared
    shared = shared / shared.norm()
    first, *others = [module for module in model.modules() if isinstance(module, Attention)]
    _look_back(first, config, shared)
    for attention in others[:2]:
        _compare(attention, first, config, shared)


def _look_back(attention: Attention, config: ModelConfig, shared: Tensor) -> None:
    half, size = config.head_dim // 2, config.head_dim
    rates = config.rope_theta ** -(torch.arange(half) / half)
    strength = 0.48 * (torch.arange(half) < half // 2)  # only fast pairs tell neighbours apart
    key = torch.cat((strength, torch.zeros(half)))
    for head in range(config.num_kv_heads):
        attention.k_proj.weight[head * size : (head + 1) * size] = torch.outer(key, shared)
    for head in range(config.num_heads):
        angles = rates * _OFFSETS[head % len(_OFFSETS)]
        query = torch.cat((strength * angles.cos(), -strength * angles.sin()))
        attention.q_proj.weight[head * size : (head + 1) * size] = torch.outer(query, shared)
    nn.init.orthogonal_(attention.v_proj.weight)
    _remove(attention.v_proj.weight, shared)
    nn.init.orthogonal_(attention.o_proj.weight, gain=_STD)


def _compare(attention: Attention, first: Attention, config: ModelConfig, shared: Tensor) -> None:
    half, size = config.head_dim // 2, config.head_dim
    slow = torch.where(torch.arange(half) >= half // 2, 1.3, 0.3).repeat(2)[:, None]
    group = config.num_heads // config.num_kv_heads
    nn.init.orthogonal_(attention.v_proj.weight)
    _remove(attention.v_proj.weight, shared)
    for kv_head in range(config.num_kv_heads):
        query_from, key_from = _COMPARED[kv_head % len(_COMPARED)]
        mixing = slow * nn.init.orthogonal_(torch.empty(size, size))
        rows = slice(kv_head * size, (kv_head + 1) * size)
        attention.k_proj.weight[rows] = mixing @ _reader(first, config, key_from)
        if query_from is None:
            reader = first.v_proj.weight[:size] / first.v_proj.weight[:size].norm(dim=1, keepdim=True)
        else:
            reader = _reader(first, config, query_from)
        for head in range(kv_head * group, (kv_head + 1) * group):
            columns = slice(head * size, (head + 1) * size)
            attention.q_proj.weight[columns] = mixing @ reader
            attention.o_proj.weight[:, columns] = 2 * _STD * attention.v_proj.weight[rows].T


def _reader(first: Attention, config: ModelConfig, head: int) -> Tensor:
    """Reads what a head of layer 0 wrote: the transpose of its output projection, unscaled."""
    columns = slice(head * config.head_dim, (head + 1) * config.head_dim)
    return first.o_proj.weight[:, columns].T / _STD


def _remove(weight: Tensor, direction: Tensor) -> None:
    weight -= torch.outer(weight @ direction, direction)
