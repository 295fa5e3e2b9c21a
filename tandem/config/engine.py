"""Sections `model` and `engine`: what a worker runs, and with which memory, batches and caches."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt

from tandem.config.pools import BlockSize, CacheDtype
from tandem.config.section import Seconds, Section
from tandem.model_path import BUILTIN, checked_name


def _switch(value: Any) -> Any:
    """YAML reads a bare `on` or `off` as a truth value."""
    return ("on" if value else "off") if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]


class PinnedShares(Section):
    """Of one worker's pool: what prefixes may hold that clients asked to be kept. A request that would not fit beside
    them makes them give way; one that does never touches them."""

    pinned_share: float = Field(default=0.25, ge=0.0, le=0.9)
    """Of the pool's blocks, over all tenants; beyond it a pin is refused."""
    pinned_tenant_share: float = Field(default=0.125, ge=0.0, le=0.9)
    """Of the pool's blocks, for one tenant; beyond it its least recently used pins give way to its new one."""


class ModelSection(Section):
    """Which model the cluster serves; the same on every worker."""

    path: str = BUILTIN
    """Directory in Hugging Face layout, a hub id, or `builtin` for the small model that ships with Tandem."""
    name: Annotated[str, AfterValidator(checked_name)] | None = None
    """Name that clients use; the last part of the path when absent."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Compute and KV dtype: `auto` is the checkpoint's own, and float32 for the built-in model."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Context bound in tokens, prompt and answer; the model's own when absent."""
    generation_config: Literal["auto", "none"] = "auto"
    """Whether temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens of the model's
    `generation_config.json` stand in for what a request leaves out; its end tokens always hold."""


class EngineSection(PinnedShares):
    """One worker's model execution."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs: `auto` is a GPU where there is one, else the CPU."""
    block_size: BlockSize = 16
    """Tokens per physical KV block."""
    num_blocks: Annotated[int, Field(ge=2)] | None = None
    """KV blocks; when absent as many as `memory_bytes` holds, or on a CPU 32 full contexts."""
    memory_bytes: PositiveInt | None = None
    """For weights, workspace and KV of one worker; when absent a share of 80 % of what machine or container has, on a
    GPU of its memory, divided evenly among the workers there. More than there is for all of them is refused."""
    max_batched_tokens: PositiveInt = 2048
    """Most tokens computed in one step."""
    prefill_chunk_tokens: PositiveInt = 1024
    """Most prompt tokens computed in one step, given to prompts in order: bounds the gap between a stream's tokens."""
    max_step_s: Seconds | None = 0.4
    """A step that continues streams gets fewer prompt tokens, though at least 64, where it would take longer than this
    at the speed that the worker measures; null: never."""
    stall_s: Seconds | None = 30.0
    """A worker ends, to be restarted, when its engine hangs in one step for so long, or for eight times as long as it
    expects of a step so large, whichever is more; null: it is not looked for."""
    max_running_requests: PositiveInt = 256
    """Requests in one worker's batch at a time."""
    max_waiting_requests: PositiveInt = 1024
    """Beyond it new requests are refused with a Retry-After."""
    eviction: Literal["lru", "lfu", "prefix"] = "lru"
    """Which cached block is given up first: least recently used, least often used (with ageing), or least shared."""
    max_overtakes: int = Field(default=8, ge=0)
    """How many waiting requests with more of their prompt cached may go before one that came earlier; 0: none."""
    priority_aging_s: Seconds | None = None
    """A request one priority lower ranks as if it had come so much later; absent: after all above it, always."""
    offload_bytes: int = Field(default=0, ge=0)
    """Host memory of a decode worker for the KV of preempted requests, where copying beats computing again; 0: none.
    Taken, and counted in `memory_bytes` on a CPU, at start."""
    host_cache_bytes: int = Field(default=0, ge=0)
    """Host memory of each worker for cached blocks that its pool evicts; 0: none. Taken like `offload_bytes`. On a CPU
    the pool itself is host memory: there it serves the disk below it."""
    disk_cache_bytes: int = Field(default=0, ge=0)
    """Of files of each worker for what `host_cache_bytes` has no room for, at most 262,144 blocks; 0: none."""
    disk_cache_path: str | None = None
    """Folder for these files: they are not encrypted, and survive a restart if `secret` is stated. One rank only."""
    pipelined: Switch = "auto"
    """Launch a step before the one before has ended; `auto` does so on a GPU. Never over several ranks."""
    num_threads: PositiveInt | None = None
    """CPU threads of each rank for tensor work; the cores divided by the ranks of all workers when absent."""
    kernels: Literal["auto", "torch"] = "auto"
    """`auto` takes compiled kernels (C++ on a CPU, Triton on CUDA) where they can be had, and says so when not."""
    quantization: Literal["none", "int8"] = "none"
    """`int8` keeps and multiplies the layers' matrices in eight bits (W8A8).
    See docs/extend/measurements.md for its cost."""
    kv_dtype: CacheDtype = "auto"
    """What keys and values are cached in: `auto` is the model's dtype, the others take about half of bfloat16's memory.
    See docs/extend/measurements.md for their cost."""
    deterministic: bool = False
    """Results never depend on the batch, the chunk size or the step at which a token is computed."""
