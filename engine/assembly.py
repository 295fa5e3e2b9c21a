"""Puts an engine together: model, memory budget, KV pool, scheduler, runner. Each step may refuse with ConfigError."""

import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.kv_cache import PagedKVCache
from engine.memory import MemoryBudget, estimate_workspace_bytes, kv_layout, plan_memory
from engine.model_config import ModelConfig
from engine.model_runner import ModelRunner
from engine.models.loader import Progress, load_model
from engine.scheduler import Scheduler
from tandem.block_hash import BlockHasher
from tandem.errors import ConfigError
from tandem.kv_layout import KVLayout

_KV_EVENT_CAPACITY = 65_536
_DEFAULT_CONTEXTS = 32
"""KV pool when nobody states its size: this many sequences of the full context, or the memory limit."""
_DEFAULT_MEMORY_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine is to be; the cluster's configuration says it (see tandem/config.py for each field)."""

    model_path: Path
    dtype: str
    max_model_len: int | None
    device: str
    block_size: int
    num_blocks: int | None
    memory_bytes: int | None
    max_batched_tokens: int
    prefill_chunk_tokens: int
    max_running_requests: int
    max_waiting_requests: int
    num_threads: int | None
    num_workers_here: int
    """Workers that share this machine, for the defaults of memory and threads."""
    secret: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """An engine ready to be started."""

    scheduler: Scheduler
    runner: ModelRunner
    config: EngineConfig
    model: ModelConfig
    layout: KVLayout
    budget: MemoryBudget
    hasher: BlockHasher

    def facts(self) -> dict[str, int]:
        """For the line that says that the process serves: the memory budget, in blocks and bytes."""
        return {
            "num_blocks": self.budget.num_blocks,
            "block_size": self.budget.block_size,
            "kv_bytes": self.budget.kv_bytes,
            "weights_bytes": self.budget.weights_bytes,
            "max_model_len": self.config.max_model_len,
        }


Buffer = Callable[[int], memoryview]
"""Gives the memory for a KV pool of so many bytes."""


def assemble(spec: EngineSpec, *, buffer: Buffer | None = None, progress: Progress | None = None) -> EngineParts:
    """Load the model, divide the memory, make the pool. `buffer` places a CPU pool in memory that peers can map.

    Raises ConfigError.
    """
    device = _device(spec.device)
    if device.type == "cpu":
        torch.set_num_threads(spec.num_threads or max(1, (os.cpu_count() or 1) // max(1, spec.num_workers_here)))
    model = load_model(spec.model_path, dtype=spec.dtype, device=device, progress=progress)
    context = _context(spec.max_model_len, model.config.max_context)
    layout = kv_layout(model.config, fingerprint=model.fingerprint, dtype=spec.dtype, block_size=spec.block_size)
    workspace_bytes = estimate_workspace_bytes(
        model.config,
        dtype=spec.dtype,
        max_batch_tokens=spec.max_batched_tokens,
        max_num_seqs=spec.max_running_requests,
        max_context=context,
    )
    max_blocks = spec.num_blocks
    if max_blocks is None and spec.memory_bytes is None and device.type == "cpu":
        max_blocks = _DEFAULT_CONTEXTS * -(-context // spec.block_size)
    budget = plan_memory(
        limit_bytes=spec.memory_bytes or _memory_limit(device, spec.num_workers_here),
        weights_bytes=model.weights_bytes,
        workspace_bytes=workspace_bytes,
        layout=layout,
        # A pool that was sized by hand may be smaller than one context: longer requests are then refused one by one.
        max_context=min(context, (spec.num_blocks or context) * spec.block_size),
        max_blocks=max_blocks,
    )
    if spec.num_blocks is not None and budget.num_blocks < spec.num_blocks:
        raise ConfigError(
            f"engine.num_blocks is {spec.num_blocks}; memory holds {budget.num_blocks} ({budget.lines()[0]})"
        )
    memory = buffer(budget.kv_bytes) if buffer is not None and device.type == "cpu" else None
    cache = PagedKVCache(layout, num_blocks=budget.num_blocks, device=device, buffer=memory)
    hasher = BlockHasher(spec.secret)
    config = _engine_config(spec, context, budget.num_blocks, frozenset(model.config.eos_token_ids))
    return EngineParts(
        scheduler=Scheduler(config, hasher),
        runner=ModelRunner(model, cache),
        config=config,
        model=model.config,
        layout=layout,
        budget=budget,
        hasher=hasher,
    )


def _engine_config(spec: EngineSpec, context: int, num_blocks: int, eos: frozenset[int]) -> EngineConfig:
    shared = {f.name for f in fields(EngineConfig)} & {f.name for f in fields(EngineSpec)}
    given = {name: getattr(spec, name) for name in shared - {"num_blocks", "max_model_len"}}
    return EngineConfig(
        **given,
        num_blocks=num_blocks,
        max_model_len=context,
        kv_event_capacity=_KV_EVENT_CAPACITY,
        eos_token_ids=eos,
    )


def _device(name: str) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("engine.device is cuda, but torch sees no CUDA device here")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def _context(wanted: int | None, most: int) -> int:
    if wanted is not None and wanted > most:
        raise ConfigError(f"model.max_model_len is {wanted}; the model's own context is {most}")
    return wanted or most


def _memory_limit(device: torch.device, num_workers: int) -> int:
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // max(1, num_workers)
    return int(free * _DEFAULT_MEMORY_SHARE)
