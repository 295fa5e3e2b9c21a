"""Assembles an engine: model, memory budget, KV pool, scheduler, runner. Each step may raise ConfigError."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch

from engine.adapters.store import AdapterStore
from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.distributed.ranks.leader import open_ranks
from engine.distributed.ranks.messages import PoolMemory, RankFacts, RankSetup
from engine.distributed.ranks.ranks import Ranks, SoloRanks
from engine.kernels.cpu.threads import threads_per_process
from engine.kv_cache.lower_tiers import HostTier
from engine.kv_cache.pins import PinBounds
from engine.kv_storage.block_file import cache_identity
from engine.kv_storage.disk_store import DiskStore, check_path
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.config import load_model_config
from engine.model.decoder import Decoder
from engine.model.gpu_memory import GpuMemoryRequest, gpu_limit_bytes
from engine.model.loader import Progress, load_model
from engine.model.memory_budget import (
    WORKSPACE_MARGIN,
    MemoryBudget,
    check_room,
    check_share_of_machine,
    default_limit_bytes,
    estimate_workspace_bytes,
    kv_layout,
    plan_memory,
)
from engine.model.pooling_head import PoolingHead, load_pooling_head
from engine.model.shard import Shard
from engine.model.spec import ModelSpec
from engine.runner.dry_run import measure_workspace_bytes
from engine.runner.model_runner import ModelRunner
from engine.sampling.grammar import LlGuides, grammar_cache_bytes
from engine.scheduler.scheduler import Scheduler
from engine.spec import EngineSpec
from engine.speculation.speculation import Speculation
from engine.tier_assembly import HostSlots, TierSizes, host_slots, open_disk, tier_spec
from engine.types.config import SchedulerConfig
from engine.types.token_guide import Guides
from engine.types.windows import WindowSpec
from tandem.errors import ConfigError
from tandem.process.host_memory import HostRoom, free_memory_bytes, memory_capacity_bytes
from tandem.telemetry.logs import configured_style
from tandem.values.block_hash import BlockHasher
from tandem.values.kv_layout import KVLayout

_log = logging.getLogger(__name__)
_KV_EVENT_CAPACITY = 65_536
_DEFAULT_CONTEXTS = 32
"""Default size of the KV pool: this many sequences of the full context, within the memory limit."""
_MOST_STEPS_UNDER_WAY = 2
"""One is launched while the one before it runs."""
_SHORTEST_TOKENS = 2
"""A prompt of one token, and its answer."""
_ADAPTER_SHARE = 16
"""Part of the limit that adapters take by default: one of so many."""
_RANK_TIMEOUT_S = 60.0
"""A rank that computes for this long while others wait for it counts as frozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """An engine ready to be started."""

    scheduler: Scheduler
    runner: ModelRunner
    config: SchedulerConfig
    model: ModelSpec
    layout: KVLayout
    budget: MemoryBudget
    """Memory budget of one rank; the same on every rank."""
    hasher: BlockHasher
    is_pipelined: bool = False
    """True when a step is launched before the previous one has ended."""
    ranks: Ranks = field(default_factory=SoloRanks)
    pool: PoolMemory | None = None
    """The KV memory of all ranks, when `assemble` was given a place for it."""
    disk: DiskStore | None = None
    """The cache's disk tier, to be closed after the engine has stopped."""
    stall_s: float | None = None
    """See `engine.stall`."""
    guides: Guides | None = None
    """Makes the guides of answers that follow a grammar."""
    adapters: AdapterStore | None = None
    """The adapters that requests may name, where any are allowed."""
    pooling_head: PoolingHead | None = None
    """What follows the pooling of an embedding model or the last state of a classifier, if anything does."""
    gpus: tuple[int, ...] = ()
    """GPUs of the worker's ranks on this node, by the numbering of the process that started the worker."""
    gpu_sharers: int = 1
    """Number of workers that share a GPU, this one included; of several GPUs, the highest."""

    def kv_memory(self) -> memoryview | None:
        """The bytes of the whole KV pool, all ranks' parts; None when they are not in one piece of host memory."""
        if self.pool is not None:
            return self.pool.buffer[: self.budget.kv_bytes * self.layout.tp_size]
        return self.runner.kv_cache.host_view() if self.layout.tp_size == 1 else None

    def own_region(self) -> memoryview | None:
        """The bytes of the KV region of this process: all ranks' parts or, where each has its own, rank 0's.

        None when they are not in host memory.
        """
        return self.kv_memory() if self.layout.num_regions == 1 else self.runner.kv_cache.host_view()

    def facts(self) -> dict[str, Any]:
        """Facts for the log line written when the process is ready: memory budget, in blocks and bytes of all ranks."""
        on_gpus = self.runner.model.device.type == "cuda"
        return {
            "dtype": str(self.runner.model.dtype).removeprefix("torch."),
            **({} if self.model.weight_format is None else self._weight_facts(self.model.weight_format)),
            "num_blocks": self.budget.num_blocks,
            "block_size": self.budget.block_size,
            "kv_bytes": self.budget.kv_bytes * self.layout.tp_size,
            "grammar_bytes": self.budget.grammar_bytes,
            **({} if self.adapters is None else {"adapter_bytes": self.budget.adapter_bytes * self.layout.tp_size}),
            "weights_bytes": self.budget.weights_bytes * self.layout.tp_size,
            "max_model_len": self.config.max_model_len,
            "tensor_parallel_size": self.layout.tp_size,
            "num_gpus": self.layout.tp_size if on_gpus else 0,
            **({"gpus": list(self.gpus), "gpu_sharers": self.gpu_sharers} if on_gpus else {}),
            "memory_bytes": self.budget.limit_bytes * self.layout.tp_size,
            "offload_bytes": self.runner.blocks.host_bytes * self.layout.tp_size,
        }

    def _weight_facts(self, weight_format: str) -> dict[str, Any]:
        return {"weight_format": weight_format, "matrices_as_stored": self.runner.model.num_kept}


Pool = Callable[[int], PoolMemory]
"""Allocates the memory of a KV pool, given its size in bytes."""


def assemble(
    spec: EngineSpec,
    *,
    pool: Pool | None = None,
    region_module: str | None = None,
    progress: Progress | None = None,
) -> EngineParts:
    """Load the model, divide the memory, make the KV pool; on several ranks, each does so with its part.

    `pool` places a CPU pool in memory that peers can map. `region_module`: module that runs a rank and serves the KV
    region that it then has for itself; with it, `pool` is not used. Raises ConfigError; RankLost when a rank dies
    meanwhile.
    """
    device = _device(spec.device, spec.ranks_here)
    if spec.takes_adapters and device.type == "cuda":
        raise ConfigError("model.adapters and model.adapter_folder: workers on GPUs do not take adapters yet")
    num_threads = threads_per_process(spec.num_threads, spec.num_workers_here)
    if device.type == "cpu":
        torch.set_num_threads(num_threads)
    # Read before the weights are loaded: the budget counts them itself.
    limit_bytes = _limit_bytes(spec, device)
    config = load_model_config(spec.model_path)
    options = BackendOptions(
        device=device,
        dtype=spec.dtype,
        kernels=spec.kernels,
        quantization=resolve_quantization(spec.quantization, config),
        kv_dtype=spec.kv_dtype,
        deterministic=spec.deterministic,
        takes_adapters=spec.takes_adapters,
        num_threads=num_threads,
        # Only when alone: otherwise every worker would bind its threads to the same first processors.
        binds_threads=num_threads > 1 and spec.num_workers_here == 1,
    )
    if spec.disk_cache_path is not None:
        check_path(spec.disk_cache_path)
    backend = select_backend(options)
    with ExitStack() as undo:
        ranks = _open_ranks(spec, config, options, region_module)
        undo.callback(ranks.close)
        model = load_model(spec.model_path, backend=backend, progress=progress, group=ranks.group)
        parts = _parts(spec, config, model, ranks, limit_bytes, pool)
        undo.pop_all()
    return parts


def resolve_quantization(quantization: str, config: ModelSpec) -> str:
    """What BackendOptions calls `engine.quantization`. A model of dense weights must not be kept from what only dense
    weights have.
    """
    is_about_stored = quantization in ("auto", "stored")
    return "none" if is_about_stored and config.weight_format is None else quantization


_QUANTIZED_ARITHMETIC = 3
"""Raised when the same quantization computes other values: 3 since stored codes of five bits are moved to the middle of
eight, and those of six are kept.
"""


def _arithmetic(quantization: str, num_kept: int) -> str:
    """What matrices were multiplied by, as far as it changes the values of KV."""
    return "none" if quantization == "none" else f"{quantization} {num_kept} {_QUANTIZED_ARITHMETIC}"


def _open_ranks(spec: EngineSpec, config: ModelSpec, options: BackendOptions, region_module: str | None) -> Ranks:
    Shard(config, rank=0, size=spec.tensor_parallel_size)  # refuses an unsplittable model before anything starts
    return open_ranks(
        RankSetup(
            rank=0,
            size=spec.tensor_parallel_size,
            model_path=spec.model_path,
            backend=options,
            log_level=logging.getLevelName(logging.getLogger().getEffectiveLevel()),
            timeout_s=_RANK_TIMEOUT_S,
            log_format=configured_style(),
            num_nodes=_num_nodes(spec),
            num_threads=spec.num_threads,
            num_sharers=spec.num_workers_here,
            gpus=spec.gpus,
            gpu_sharers=spec.gpu_sharers,
            configured_bytes=_configured_bytes(spec),
        ),
        spec.nodes,
        region_module,
    )


def _parts(
    spec: EngineSpec, config: ModelSpec, model: Decoder, ranks: Ranks, limit_bytes: int, pool: Pool | None
) -> EngineParts:
    size, device = spec.tensor_parallel_size, model.device
    combined = ranks.wait_loaded(RankFacts(weights_bytes=model.weights_bytes, fingerprint=model.fingerprint))
    if combined.limit_bytes is not None and spec.memory_bytes is None:
        limit_bytes = min(limit_bytes, combined.limit_bytes)
    context = _context(spec.max_model_len, config.max_context)
    layout = _layout(spec, config, model, context)
    windows = _windows(spec, layout, device)
    rooms = [HostRoom(free_memory_bytes()), *([] if combined.room is None else [combined.room])]
    slots = host_slots(_tier_sizes(spec), layout, rooms, num_nodes=_num_nodes(spec))
    budget = _budget(model, layout, spec, ranks, limit_bytes, combined.weights_bytes, slots.num_slots, windows)
    is_private = bool(ranks.region_links)
    if spec.memory_bytes is not None and device.type == "cpu":
        check_room(
            budget,
            memory_bytes=spec.memory_bytes,
            pool_bytes=budget.kv_bytes * (spec.ranks_here if is_private else size),
            num_ranks=spec.ranks_here,
            free_bytes=rooms[0].free_bytes,
        )
    if is_private:
        layout = replace(layout, num_regions=size)
    memory = None if pool is None or is_private or device.type != "cpu" else pool(budget.kv_bytes * size)
    ranks.use_pool(layout, budget.num_blocks, memory, num_host_slots=slots.num_slots)
    own = None if memory is None else memory.buffer[: budget.kv_bytes]
    cache = PagedKVCache(layout, num_blocks=budget.num_blocks, device=device, buffer=own)
    runner = _runner(model, cache, ranks, slots.num_slots)
    if size == 1:
        runner.record_graphs(max_rows=spec.max_step_rows, max_tokens=spec.max_batched_tokens, max_length=context)
    hasher = BlockHasher(spec.secret)
    engine_config = _engine_config(spec, context, budget.num_blocks, frozenset(config.eos_token_ids), windows)
    scheduler, disk = _scheduler(spec, engine_config, hasher, runner, slots)
    if ranks.mirror is not None:
        scheduler.reservations.on_bound = ranks.mirror.mark_received
    return EngineParts(
        scheduler=scheduler,
        runner=runner,
        config=engine_config,
        model=config,
        layout=layout,
        budget=budget,
        hasher=hasher,
        is_pipelined=_is_pipelined(spec, device),
        ranks=ranks,
        pool=memory,
        disk=disk,
        stall_s=spec.stall_s,
        gpus=spec.gpus or tuple(range(spec.ranks_here)),
        gpu_sharers=spec.gpu_sharers,
        guides=_guides(spec, config, limit_bytes),
        adapters=_adapters(spec, config, model, ranks, budget),
        pooling_head=load_pooling_head(spec.model_path, config.hidden_size),
    )


def _layout(spec: EngineSpec, config: ModelSpec, model: Decoder, context: int) -> KVLayout:
    return kv_layout(
        config,
        fingerprint=model.fingerprint,
        dtype=spec.dtype,
        block_size=spec.block_size,
        tp_size=spec.tensor_parallel_size,
        kv_dtype=spec.kv_dtype,
        apart_below=context if spec.windowed_layers == "apart" else None,
    )


def _largest_context(spec: EngineSpec, context: int, windows: WindowSpec | None) -> int:
    """Longest sequence that the pool must hold. Raises ConfigError for a pool sized by hand that is of no use."""
    if spec.num_blocks is None:
        return context
    # Such a pool may be smaller than one context: longer requests are then refused one by one.
    if windows is None:
        return min(context, spec.num_blocks * spec.block_size)
    most, needed = windows.max_tokens(spec.num_blocks), spec.max_model_len or _SHORTEST_TOKENS
    if most < needed:
        raise ConfigError(
            f"engine.num_blocks is {spec.num_blocks}: with engine.windowed_layers apart, a sequence of {needed} tokens"
            f" takes {windows.num_blocks(needed)} blocks"
        )
    return min(context, most)


def _adapters(
    spec: EngineSpec, config: ModelSpec, model: Decoder, ranks: Ranks, budget: MemoryBudget
) -> AdapterStore | None:
    if model.adapters is None:
        return None
    return AdapterStore(
        config,
        model.adapters,
        ranks,
        dtype=spec.dtype,
        capacity_bytes=budget.adapter_bytes,
        max_rank=spec.max_adapter_rank,
    )


def _adapter_bytes(spec: EngineSpec, limit_bytes: int) -> int:
    """Memory of one rank for adapters."""
    if not spec.takes_adapters:
        return 0
    if spec.adapter_bytes is None:
        return limit_bytes // _ADAPTER_SHARE
    return spec.adapter_bytes // spec.tensor_parallel_size


def _guides(spec: EngineSpec, config: ModelSpec, limit_bytes: int) -> LlGuides:
    return LlGuides(
        spec.model_path / "tokenizer.json",
        vocab_size=config.vocab_size,
        eos_token_ids=sorted(config.eos_token_ids),
        cache_bytes=grammar_cache_bytes(limit_bytes),
    )


def _runner(model: Decoder, cache: PagedKVCache, ranks: Ranks, num_host_slots: int) -> ModelRunner:
    on_computed = None if ranks.mirror is None else ranks.mirror.fetch_prompt_blocks
    return ModelRunner(model, cache, announce=ranks.announce, num_host_slots=num_host_slots, on_computed=on_computed)


def _budget(
    model: Decoder,
    layout: KVLayout,
    spec: EngineSpec,
    ranks: Ranks,
    limit_bytes: int,
    weights_bytes: int,
    num_host_slots: int,
    windows: WindowSpec | None,
) -> MemoryBudget:
    """Divide one rank's memory: the workspace is measured, the KV pool gets the rest. Raises ConfigError."""
    context = _context(spec.max_model_len, model.config.max_context)
    largest_context = _largest_context(spec, context, windows)
    max_blocks = spec.num_blocks
    if max_blocks is None and spec.memory_bytes is None and model.device.type == "cpu":
        of_context = -(-context // spec.block_size) if windows is None else windows.num_blocks(context)
        max_blocks = _DEFAULT_CONTEXTS * of_context
    # A GPU's limit covers its own memory only; offloaded blocks and grammars are in host memory.
    is_host = model.device.type == "cpu"
    offload_bytes = num_host_slots * layout.block_bytes if is_host else 0
    grammar_bytes = grammar_cache_bytes(limit_bytes) if is_host else 0
    adapter_bytes = _adapter_bytes(spec, limit_bytes)
    taken_bytes = weights_bytes + offload_bytes + grammar_bytes + adapter_bytes
    rest = max(0, limit_bytes - taken_bytes) // layout.block_bytes
    workspace_bytes = _workspace_bytes(model, layout, spec, context, min(rest, max_blocks or rest), ranks)
    plan = partial(
        plan_memory,
        limit_bytes=limit_bytes,
        weights_bytes=weights_bytes,
        workspace_bytes=workspace_bytes,
        layout=layout,
        max_context=largest_context,
        windows=windows,
        offload_bytes=offload_bytes,
        grammar_bytes=grammar_bytes,
        adapter_bytes=adapter_bytes,
    )
    if spec.nodes is not None and model.device.type == "cpu" and not ranks.region_links:
        # This node holds every node's part of the pool; see engine.distributed.ranks.mirror.
        most = plan().num_blocks // spec.nodes.num_nodes
        max_blocks = min(most, max_blocks or most)
    budget = plan(max_blocks=max_blocks)
    if spec.num_blocks is not None and budget.num_blocks < spec.num_blocks:
        raise ConfigError(
            f"engine.num_blocks is {spec.num_blocks}; memory holds {budget.num_blocks} ({budget.lines()[0]})"
        )
    return budget


def _scheduler(
    spec: EngineSpec, config: SchedulerConfig, hasher: BlockHasher, runner: ModelRunner, slots: HostSlots
) -> tuple[Scheduler, DiskStore | None]:
    """Make the scheduler, with the tiers that have room. Copy rates are measured here, compute rates while it runs."""
    pins = PinBounds.from_shares(config.num_blocks, share=spec.pinned_share, tenant_share=spec.pinned_tenant_share)
    if not slots.num_slots:
        return Scheduler(config, hasher, pins=pins, clock=time.monotonic, speculation=_speculation(spec)), None
    layout, mover = runner.kv_cache.layout, runner.blocks
    # Settings that change the bits of KV: blocks on disk outlive the process, and perhaps its settings.
    arithmetic = _arithmetic(resolve_quantization(spec.quantization, runner.model.config), runner.model.num_kept)
    computed_by: tuple[str, ...] = (
        spec.dtype,
        arithmetic,
        spec.kernels,
        str(spec.deterministic),
        runner.model.device.type,
    )
    if spec.takes_adapters:
        computed_by += ("gates rounded before they are multiplied",)
    disk = open_disk(_tier_sizes(spec), mover, cache_identity(layout, secret=spec.secret, computed_by=computed_by))
    scheduler = Scheduler(
        config,
        hasher,
        tier=HostTier(slots.num_offload) if slots.num_offload else None,
        block_bytes=layout.block_bytes,
        cache=tier_spec(slots, mover, layout, None if disk is None else disk[1]),
        pins=pins,
        clock=time.monotonic,
        speculation=_speculation(spec),
    )
    rates = mover.measure()
    if scheduler.offloading is not None:
        scheduler.offloading.set_copy_rates(rates)
    if scheduler.tiers is not None:
        scheduler.tiers.costs.set_copy_rates(rates)
    return scheduler, None if disk is None else disk[0]


def _speculation(spec: EngineSpec) -> Speculation | None:
    return None if spec.speculation is None else Speculation(spec.speculation)


def _num_nodes(spec: EngineSpec) -> int:
    return 1 if spec.nodes is None else spec.nodes.num_nodes


def _tier_sizes(spec: EngineSpec) -> TierSizes:
    return TierSizes(
        offload_bytes=spec.offload_bytes,
        host_cache_bytes=spec.host_cache_bytes,
        disk_cache_bytes=spec.disk_cache_bytes,
        disk_cache_path=spec.disk_cache_path,
    )


def _is_pipelined(spec: EngineSpec, device: torch.device) -> bool:
    """Resolve `spec.pipelined`. "auto" is off on a CPU, where planning ahead would compete with the step itself."""
    wanted = device.type == "cuda" if spec.pipelined == "auto" else spec.pipelined == "on"
    if wanted and spec.tensor_parallel_size > 1:
        _log.info("steps are not pipelined over several ranks: each rank needs the tokens of the step before")
        return False
    if wanted and spec.speculation is not None:
        _log.info("steps are not pipelined with speculation: drafts follow tokens that are known")
        return False
    return wanted


def _workspace_bytes(
    model: Decoder, layout: KVLayout, spec: EngineSpec, context: int, num_blocks: int, ranks: Ranks
) -> int:
    """Workspace of a step, with its margin: measured where the system can, else estimated."""
    ranks.begin_dry_run(layout)
    own = measure_workspace_bytes(
        model,
        layout,
        max_batched_tokens=spec.max_batched_tokens,
        prefill_chunk_tokens=spec.prefill_chunk_tokens,
        max_running_requests=spec.max_running_requests,
        max_draft_rows=spec.max_step_rows - spec.max_running_requests,
        max_context=context,
        max_pool_tokens=num_blocks * layout.block_size,
        announce=ranks.announce,
    )
    measured = ranks.end_dry_run(own)
    if measured is not None:
        return int(measured * WORKSPACE_MARGIN)
    return estimate_workspace_bytes(
        model.config,
        dtype=spec.dtype,
        max_batch_tokens=spec.max_batched_tokens,
        max_num_seqs=spec.max_step_rows,
        max_context=context,
        kv_dtype=spec.kv_dtype,
    )


def _engine_config(
    spec: EngineSpec, context: int, num_blocks: int, eos: frozenset[int], windows: WindowSpec | None
) -> SchedulerConfig:
    shared = {f.name for f in fields(SchedulerConfig)} & {f.name for f in fields(EngineSpec)}
    given = {name: getattr(spec, name) for name in shared - {"num_blocks", "max_model_len"}}
    return SchedulerConfig(
        **given,
        num_blocks=num_blocks,
        max_model_len=context,
        kv_event_capacity=_KV_EVENT_CAPACITY,
        eos_token_ids=eos,
        windows=windows,
    )


def _windows(spec: EngineSpec, layout: KVLayout, device: torch.device) -> WindowSpec | None:
    """How windowed layers are held that are kept apart; None where none are. Raises ConfigError."""
    if not layout.windowed_layers:
        return None
    if device.type == "cuda":
        raise ConfigError("engine.windowed_layers is apart, which GPUs do not support: set it to together")
    chunk = min(spec.prefill_chunk_tokens, spec.max_batched_tokens)
    most_drafts = 0 if spec.speculation is None else spec.speculation.max_draft_tokens
    return WindowSpec(
        window=layout.window,
        num_groups=len(layout.groups) - 1,
        block_size=layout.block_size,
        ahead_tokens=_MOST_STEPS_UNDER_WAY * max(chunk, 1 + most_drafts),
    )


def _device(name: str, num_ranks: int) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("engine.device is cuda, but torch sees no CUDA device here")
    if not has_cuda or name == "cpu":
        return torch.device("cpu")
    if num_ranks > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}; torch sees {torch.cuda.device_count()} CUDA devices here"
        )
    return torch.device("cuda", 0)


def _limit_bytes(spec: EngineSpec, device: torch.device) -> int:
    """Memory limit of one rank, before anything is loaded. Raises ConfigError where the machine or a GPU has less."""
    configured_bytes = _configured_bytes(spec)
    if device.type == "cuda":
        gpu = spec.gpus[0] if spec.gpus else 0
        request = GpuMemoryRequest(index=gpu, sharers=spec.gpu_sharers, configured_bytes=configured_bytes)
        return gpu_limit_bytes(request, device)
    if spec.memory_bytes is None or configured_bytes is None:
        return default_limit_bytes(free_memory_bytes(), spec.num_workers_here)
    here_bytes = max(configured_bytes * spec.ranks_here, spec.memory_here_bytes or 0)
    check_share_of_machine(spec.memory_bytes, here_bytes=here_bytes, capacity_bytes=memory_capacity_bytes())
    return configured_bytes


def _configured_bytes(spec: EngineSpec) -> int | None:
    """`memory_bytes` divided by the number of ranks; None when it is not set."""
    return None if spec.memory_bytes is None else spec.memory_bytes // spec.tensor_parallel_size


def _context(wanted: int | None, most: int) -> int:
    if wanted is not None and wanted > most:
        raise ConfigError(f"model.max_model_len is {wanted}; the model's own context is {most}")
    return wanted or most
