"""Sections `model` and `engine`: the model, and a worker's memory, batches and caches."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PositiveInt, model_validator

from tandem.adapters.files import MAX_ADAPTER_RANK, checked_adapter_name
from tandem.config.pools import BlockSize, CacheDtype, Quantization
from tandem.config.section import Seconds, Section
from tandem.model_path import BUILTIN, BUILTIN_NAME, checked_name, default_name


def _switch(value: Any) -> Any:
    """Restore the text of a bare `on` or `off`, which YAML reads as a boolean."""
    return ("on" if value else "off") if isinstance(value, bool) else value


Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]


class PinnedShares(Section):
    """Shares of one worker's KV pool for prefixes that clients pinned. Pins are evicted only for a request that would
    not fit otherwise."""

    pinned_share: float = Field(default=0.25, ge=0.0, le=0.9)
    """Share of the pool's blocks for the pins of all tenants; beyond it a pin is rejected."""
    pinned_tenant_share: float = Field(default=0.125, ge=0.0, le=0.9)
    """Share of the pool's blocks for the pins of one tenant; beyond it its least recently used pins are evicted."""


class SpeculationSection(Section):
    """Speculative decoding: a step verifies drafts of the next tokens. It changes no answer, only its speed."""

    sources: tuple[Literal["grammar", "prediction", "lookup", "suffix"], ...] = ()
    """Where drafts come from, by priority: tokens that a grammar forces, the `prediction` that a request came with, the
    request's own text, earlier answers of the same tenant. Empty: no speculation."""
    max_draft_tokens: int = Field(default=8, ge=1, le=64)
    """Maximum number of drafts of one sequence in one step."""
    adaptive: bool = True
    """Verify only as many drafts as pay by measured step times, and none where they would cost time. false: all."""


class ModelSection(Section):
    """The model that every worker of the cluster serves."""

    path: str = BUILTIN
    """Directory in Hugging Face layout, a `.gguf` file, a hub id, or `builtin` for the small model that ships with
    Tandem."""
    name: Annotated[str, AfterValidator(checked_name)] | None = None
    """Name that clients use. null: the last part of the path, without `.gguf`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of computation and KV. `auto`: the checkpoint's own, and float32 for the built-in model."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Maximum context length in tokens, prompt and completion together. null: the model's own."""
    generation_config: Literal["auto", "none"] = "auto"
    """Whether temperature, top_k, top_p, min_p, repetition_penalty and max_new_tokens of the model's
    `generation_config.json` stand in for what a request leaves out; its end tokens always hold."""
    reranker: Literal["auto", "qwen3"] = "auto"
    """What /v1/rerank and /v1/score make of the model. `auto`: what its files say (docs/use/models.md); `qwen3`: it
    judges as Qwen3-Reranker's model card says, which that model's first files do not tell: the probability of yes
    against no after a query and a document."""
    adapters: dict[Annotated[str, AfterValidator(checked_adapter_name)], str] = Field(default={})
    """LoRA adapters of the model by the names that clients use as `model`: each a directory that PEFT wrote, with
    `adapter_config.json` and `adapter_model.safetensors`, at the same path wherever a router or a worker runs."""
    adapter_folder: str | None = None
    """Directory below which adapters may be loaded while the cluster runs (`/v1/load_lora_adapter`), at the same path
    wherever a router or a worker runs. null: none may, only `adapters` are served."""

    @property
    def takes_adapters(self) -> bool:
        """Whether workers have to be ready for adapters."""
        return bool(self.adapters) or self.adapter_folder is not None

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        own = self.name or (BUILTIN_NAME if self.path == BUILTIN else default_name(self.path))
        if own in self.adapters:
            raise ValueError(f"adapters.{own}: this is the name of the model itself")
        return self


class EngineSection(PinnedShares):
    """One worker's model execution."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that the model runs on. `auto`: a GPU if there is one, else the CPU."""
    block_size: BlockSize = 16
    """Tokens per KV block."""
    num_blocks: Annotated[int, Field(ge=2)] | None = None
    """Number of KV blocks. null: as many as `memory_bytes` holds, or on a CPU enough for 32 full contexts."""
    memory_bytes: PositiveInt | None = None
    """Memory of one worker for weights, workspace and KV. null: an even share of 80 % of free memory (on a GPU: of
    total memory), split among the workers there. It is an error if together they need more than the machine has."""
    max_batched_tokens: PositiveInt = 2048
    """Maximum number of tokens computed in one step."""
    prefill_chunk_tokens: PositiveInt = 1024
    """Maximum number of prompt tokens computed in one step, which bounds the gap between a stream's tokens."""
    max_step_s: Seconds | None = 0.4
    """Maximum step duration while streams are running: a step gets fewer prompt tokens, but at least 64, if it would
    take longer at the worker's measured speed. null: no such limit."""
    stall_s: Seconds | None = 30.0
    """A worker exits, to be restarted, when its engine has been in one step for this long, or for eight times the
    expected duration of that step, whichever is longer. null: never."""
    max_running_requests: PositiveInt = 256
    """Maximum number of requests in one worker's batch."""
    max_waiting_requests: PositiveInt = 1024
    """Maximum number of requests in one worker's queue; further ones are rejected with a Retry-After."""
    eviction: Literal["lru", "lfu", "prefix"] = "lru"
    """Which cached block is evicted first: least recently used, least frequently used (with aging), or least shared."""
    max_overtakes: int = Field(default=8, ge=0)
    """Maximum number of queued requests with more of their prompt cached that may overtake an earlier one. 0: none."""
    priority_aging_s: Seconds | None = None
    """A request one priority lower ranks as if it had arrived this much later. null: strictly after all requests of a
    better priority."""
    offload_bytes: int = Field(default=0, ge=0)
    """Host memory of a decode worker for the KV of preempted requests, used where copying is faster than recomputing.
    0: none. Allocated at start; on a CPU it counts towards `memory_bytes`."""
    host_cache_bytes: int = Field(default=0, ge=0)
    """Host memory of each worker for cached blocks that its pool evicts. 0: none. Allocated like `offload_bytes`. On a
    CPU, where the pool is host memory already, it is the buffer in front of the disk cache."""
    disk_cache_bytes: int = Field(default=0, ge=0)
    """Disk space of each worker for blocks evicted from `host_cache_bytes`, at most 262,144 blocks. 0: none."""
    disk_cache_path: str | None = None
    """Directory of the disk cache. Its files are not encrypted; they survive a restart if `secret` is set. Needs a
    tensor parallel size of 1."""
    kv_memory: Literal["shared", "private"] = "shared"
    """Multi-rank workers on CPUs: ranks share one KV mapping, or each has its own, as on GPUs. On one node `private` is
    slower and meant for testing; over several (`nodes`) it saves rank 0 the copies of the others' parts."""
    pipelined: Switch = "auto"
    """Launch a step before the previous one has ended. `auto`: on a GPU only. Never with several ranks."""
    num_threads: PositiveInt | None = None
    """CPU threads of each rank for tensor operations. null: the cores divided by the ranks of all workers."""
    kernels: Literal["auto", "torch"] = "auto"
    """`auto`: compiled kernels (C++ on a CPU, Triton on CUDA) where available, with a log line where not."""
    quantization: Quantization = "auto"
    """How matrices are held and multiplied. `stored`: as a quantized checkpoint has them, where there are kernels for
    it, on CPUs in bfloat16, on GPUs in bfloat16 and float16 (docs/use/models.md), else restored; `none`: restored;
    `auto`: on GPUs as `stored`; on CPUs codes of integers, where there is no AMX, whose tiles compute prompts faster
    from restored weights, all else as with `none`. Of float or restored weights, on CPUs in bfloat16: `int8`: weights
    in eight bits by output column, inputs by row; `int4`: the layers' weights in four bits by groups of 32, inputs in
    eight bits by the same groups, the head as with `int8`. On GPUs, in bfloat16 and float16: the same weights; inputs
    as they are, of those in eight bits also by row. On CPUs alone, in bfloat16 or float32, inputs as they are, the head
    as with `int8` in bfloat16 only: `fp8`: the layers' weights in E4M3 by output column; `nf4`: in bitsandbytes' NF4 by
    blocks of 64. Both save memory, not time. See docs/extend/measurements.md for the loss of accuracy."""
    kv_dtype: CacheDtype = "auto"
    """Data type of cached keys and values. `auto`: the model's; `int8` and `fp8_e4m3` take about half of bfloat16's
    memory, `int4`, which only CPUs compute, 9/32 of it. See docs/extend/measurements.md for the loss of accuracy."""
    windowed_layers: Literal["together", "apart"] = "together"
    """Where some layers of a model attend to a window and others to everything: `together`: a KV block holds all
    layers; `apart`: windowed layers have blocks of their own, which are given up as soon as no token attends to them.
    In both pools, on CPUs, without `offload_bytes`, `host_cache_bytes` and `disk_cache_bytes`, and with the ranks of a
    worker on one node. Prefixes are then found where a sequence has ended or where others have parted from it, and are
    not fetched from other workers. A pin inside a prompt takes effect with its second use: until then
    `GET /debug/pins` shows it with 0 tokens. Other models are not affected."""
    quality_gate: str | None = None
    """File that `tandem eval --gate` wrote, relative to the model's directory. Each worker scores its text before it
    serves, and ends where the perplexity is further above the base's than the scheme of its weights may be
    (docs/use/models.md). null: none."""
    adapter_bytes: PositiveInt | None = None
    """Memory of one worker for LoRA adapters that it has loaded, where the configuration has any (`model.adapters`,
    `model.adapter_folder`); part of `memory_bytes`. The least recently used ones that no request needs make room for
    others. null: a 16th of the worker's memory."""
    max_adapter_rank: int = Field(default=64, ge=1, le=MAX_ADAPTER_RANK)
    """Maximum rank of LoRA adapters; one of a higher rank is refused."""
    speculation: SpeculationSection = SpeculationSection()
    """Speculative decoding. Steps are not `pipelined` with it."""
    deterministic: bool = False
    """Make results independent of the batch, the chunk size and the step in which a token is computed."""
