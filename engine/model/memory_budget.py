"""One memory budget, made at start, logged, and kept: weights, workspace, headroom; the rest is KV blocks."""

from dataclasses import dataclass

from engine.model.spec import ModelSpec
from engine.types.windows import WindowSpec
from tandem.errors import ConfigError
from tandem.values.kv_layout import AUTO_DTYPE, DTYPE_BITS, KVLayout, windows_worth_keeping_apart

MAX_GATHER_BYTES = 256 * 2**20
"""Most bytes that one layer's attention may copy out of the pool at once, unless a single sequence needs more."""

MAX_MASK_ELEMENTS = 2**24
"""Largest attention mask that a step keeps, in elements."""

WORKSPACE_MARGIN = 1.25
"""What is set aside for a step, over what it takes: malloc retains some of what steps free."""

_DEFAULT_SHARE = 0.8

_HEADROOM_SHARE = 0.05


def default_limit_bytes(available_bytes: int, num_sharers: int = 1) -> int:
    """Memory limit of each of `num_sharers` where `engine.memory_bytes` is not set: its part of 80 %.

    `available_bytes`: on a CPU the memory free when the worker starts, on a GPU all of its memory.
    """
    return int(available_bytes * _DEFAULT_SHARE) // max(1, num_sharers)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Division of one rank's memory, in bytes."""

    limit_bytes: int
    weights_bytes: int
    workspace_bytes: int
    headroom_bytes: int
    block_bytes: int
    block_size: int
    num_blocks: int
    offload_bytes: int = 0
    """Memory for the KV of preempted requests and evicted blocks, where it counts toward this limit."""
    grammar_bytes: int = 0
    """Memory for compiled grammars, where it counts toward this limit."""
    adapter_bytes: int = 0
    """Memory for adapters."""
    longest_tokens: int | None = None
    """Longest sequence that the pool holds, where windowed layers have blocks of their own; None: all tokens."""

    @property
    def kv_bytes(self) -> int:
        """Bytes of all KV blocks."""
        return self.num_blocks * self.block_bytes

    def lines(self) -> tuple[str, ...]:
        """The budget as lines for the start banner."""
        tokens = f"{self.num_blocks * self.block_size} tokens"
        if self.longest_tokens is not None:
            tokens = f"one sequence of {self.longest_tokens} tokens, or more shorter ones"
        offload = (f"offload    {_size(self.offload_bytes)}",) if self.offload_bytes else ()
        grammars = (f"grammars   {_size(self.grammar_bytes)}",) if self.grammar_bytes else ()
        adapters = (f"adapters   {_size(self.adapter_bytes)}",) if self.adapter_bytes else ()
        return (
            f"memory     {_size(self.limit_bytes)}",
            f"weights    {_size(self.weights_bytes)}",
            f"workspace  {_size(self.workspace_bytes)}",
            f"headroom   {_size(self.headroom_bytes)}",
            *offload,
            *grammars,
            *adapters,
            f"KV cache   {_size(self.kv_bytes)}: {self.num_blocks} blocks of {self.block_size} = {tokens}",
        )


def plan_memory(
    *,
    limit_bytes: int,
    weights_bytes: int,
    workspace_bytes: int,
    layout: KVLayout,
    max_context: int,
    max_blocks: int | None = None,
    offload_bytes: int = 0,
    grammar_bytes: int = 0,
    adapter_bytes: int = 0,
    windows: WindowSpec | None = None,
) -> MemoryBudget:
    """Divide `limit_bytes`. `max_blocks` bounds the pool where the rest would hold more than is wanted.

    `offload_bytes`, `grammar_bytes`, `adapter_bytes`: parts of the limit for offloaded KV, compiled grammars and
    adapters. `windows`: how
    windowed layers are held that are kept apart.
    Raises ConfigError, with the figures, when one sequence of `max_context` tokens would not fit.
    """
    headroom_bytes = int(limit_bytes * _HEADROOM_SHARE)
    rest = limit_bytes - weights_bytes - workspace_bytes - headroom_bytes - offload_bytes - grammar_bytes
    rest -= adapter_bytes
    num_blocks = max(0, rest) // layout.block_bytes
    if max_blocks is not None:
        num_blocks = min(num_blocks, max_blocks)
    budget = MemoryBudget(
        limit_bytes=limit_bytes,
        weights_bytes=weights_bytes,
        workspace_bytes=workspace_bytes,
        headroom_bytes=headroom_bytes,
        block_bytes=layout.block_bytes,
        block_size=layout.block_size,
        num_blocks=num_blocks,
        offload_bytes=offload_bytes,
        grammar_bytes=grammar_bytes,
        adapter_bytes=adapter_bytes,
        longest_tokens=None if windows is None else windows.max_tokens(num_blocks),
    )
    needed = -(-max_context // layout.block_size) if windows is None else windows.num_blocks(max_context)
    if num_blocks < needed:
        parts = "; ".join(" ".join(line.split()) for line in budget.lines())
        raise ConfigError(
            f"not enough memory for one sequence of {max_context} tokens: it takes {needed} KV blocks "
            f"({_size(needed * layout.block_bytes)}), {num_blocks} fit ({parts}). "
            "Raise engine.memory_bytes, or lower model.max_model_len or engine.max_batched_tokens."
        )
    return budget


def check_share_of_rank(rank_bytes: int, *, free_bytes: int) -> None:
    """Raise ConfigError when a rank's part of `engine.memory_bytes` exceeds its share of its machine's free memory."""
    if rank_bytes > free_bytes:
        raise ConfigError(
            f"engine.memory_bytes: each rank may take {rank_bytes} bytes; one has {free_bytes} bytes of memory free"
        )


def check_share_of_machine(memory_bytes: int, *, here_bytes: int, capacity_bytes: int) -> None:
    """Raise ConfigError when the workers of one machine may take `here_bytes`, and it has less."""
    if here_bytes > capacity_bytes:
        raise ConfigError(
            f"engine.memory_bytes is {memory_bytes} for each worker: those of this machine may take {here_bytes} bytes,"
            f" and it has {capacity_bytes} (the least of its memory and of its control groups' limits)"
        )


def check_room(budget: MemoryBudget, *, memory_bytes: int, pool_bytes: int, num_ranks: int, free_bytes: int) -> None:
    """Check, once the weights are loaded, that `free_bytes` hold the rest of a configured budget. Raises ConfigError.

    `pool_bytes`: size of the KV pool on this machine; `num_ranks`: the worker's ranks on this machine.
    """
    needed = pool_bytes + num_ranks * (budget.workspace_bytes + budget.offload_bytes + budget.adapter_bytes)
    if needed > free_bytes:
        raise ConfigError(
            f"engine.memory_bytes is {memory_bytes}: besides the weights this worker needs {needed} bytes "
            f"({pool_bytes} of them for KV), and {free_bytes} bytes of memory are free"
        )


def estimate_workspace_bytes(
    config: ModelSpec,
    *,
    dtype: str,
    max_batch_tokens: int,
    max_num_seqs: int,
    max_context: int,
    kv_dtype: str = AUTO_DTYPE,
) -> int:
    """Upper bound on the memory of one step beside weights and KV: hidden states, gathered KV, masks, logits; and a
    margin for what malloc retains.
    """
    item = DTYPE_BITS[dtype] // 8
    # Codes are gathered, in int4 also unpacked to bytes, multiplied in float32, and rounded.
    codes = 2 if kv_dtype == "int4" else 1
    restored = 0 if kv_dtype == AUTO_DTYPE else codes + DTYPE_BITS["float32"] // 8
    rows = max(max_batch_tokens, max_num_seqs)
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    attention = config.num_heads * config.head_dim
    # Residual, its norm and one block's output; qkv with its rotated copy; gate, up, activation and product.
    per_row = 4 * config.hidden_size + 2 * qkv + 2 * attention + 4 * _largest_gate(config)
    one_sequence = 2 * config.num_kv_heads * config.head_dim * max_context * (item + restored)
    pool_share = one_sequence * max_num_seqs
    gathered = max(min(MAX_GATHER_BYTES, pool_share), one_sequence)
    masks = min(MAX_MASK_ELEMENTS, rows * max_context) * item
    # Sampling works in float32: logits, their copy, sorted values and indices, noise and its integers.
    sampling = max_num_seqs * config.vocab_size * 4 * 12
    of_rows = rows * (per_row * item + _routing_bytes(config, item))
    return int((of_rows + gathered + masks + sampling) * WORKSPACE_MARGIN)


def _largest_gate(config: ModelSpec) -> int:
    """Values of the largest gate that one projection computes."""
    if (moe := config.moe) is None:
        return config.intermediate_size
    return max(moe.expert_size, moe.shared_size or 0, 0 if config.is_sparse_throughout else config.intermediate_size)


def _routing_bytes(config: ModelSpec, item: int) -> int:
    """Bytes that a mixture of experts takes for a row, beside gates: its copy for an expert, what that returns and the
    sum of all, both in float32; logits and probabilities of experts, and their order.
    """
    if (moe := config.moe) is None:
        return 0
    return config.hidden_size * (item + 2 * 4) + (moe.num_experts + 1) * (2 * 4 + 2 * 8)


def kv_layout(
    config: ModelSpec,
    *,
    fingerprint: str,
    dtype: str,
    block_size: int,
    tp_size: int = 1,
    kv_dtype: str = AUTO_DTYPE,
    apart_below: int | None = None,
) -> KVLayout:
    """KV geometry of a model that computes in `dtype`, for rank 0 of `tp_size`.

    `apart_below`: layers with windows of fewer tokens are kept apart from those that attend to everything; None: none.
    """
    layers, window = windows_worth_keeping_apart(config.layer_windows, apart_below or 0)
    return KVLayout(
        model_fingerprint=fingerprint,
        dtype=dtype if kv_dtype == AUTO_DTYPE else kv_dtype,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        tp_size=tp_size,
        windowed_layers=layers,
        window=window,
    )


def _size(num_bytes: int) -> str:
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
