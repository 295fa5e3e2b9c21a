"""The cluster's configuration: one YAML, one frozen model per section, every default stated once, here.

`load` reads the file, applies `TANDEM_*` environment overrides and validates; an unknown key is an error that names
it. Helm and Ray render the same file. This is the only module that reads the environment.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Self, get_args

import yaml
from pydantic import BaseModel, Field, PositiveInt, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from tandem.config.access import RouterAccess
from tandem.config.admission import HedgingConfig, LimitsConfig, QueueConfig, mistaken_keys
from tandem.config.batches import BatchesConfig
from tandem.config.engine import EngineSection, ModelSection
from tandem.config.pools import PoolConfig, Port, mistaken_context, mistaken_nodes
from tandem.config.prices import PriceConfig
from tandem.config.ray import RayConfig
from tandem.config.redis import RedisConfig
from tandem.config.section import Seconds, Section
from tandem.config.servers import (
    ConnectionsConfig,
    GrammarsConfig,
    PromptCacheConfig,
    QualityConfig,
    ReasoningParserName,
    ToolParserName,
)
from tandem.config.source.environment import put, put_variables
from tandem.config.source.yaml_file import read_mapping
from tandem.config.telemetry import ProfilingConfig, TelemetryConfig
from tandem.errors import ConfigError
from tandem.model_path import BUILTIN, BUILTIN_DTYPE
from tandem.rpc.hosts import checked_address
from tandem.values.block_hash import mistaken_secret
from tandem.values.disk_cache import contradiction
from tandem.values.kv_agreement import cannot_travel_as
from tandem.values.kv_layout import AUTO_DTYPE

_MAX_LISTED_MISTAKES = 16
"""Mistakes of one configuration."""
_MIN_SIMILARITY = 0.7
"""As `difflib` measures it: a letter more, less or swapped in a short name."""
_BOUND_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
"""Mistakes of numbers, which are no secrets."""


class TlsConfig(Section):
    """PEM files of a worker, the same paths on all; every worker of the cluster has them, or none."""

    cert: str
    """Its certificate, and what lies between that and the authority."""
    key: str
    """The certificate's key, not encrypted."""
    ca: str
    """Certificate of the private authority that signs for workers, and for nobody else."""


class TransferConfig(Section):
    """Moving KV between workers."""

    transport: Literal["auto", "cuda_ipc", "shm", "nixl", "torch_dist", "tcp"] = "auto"
    """`auto` takes the best that both workers can do: on one host cuda_ipc between GPUs, else shm; where both have
    RDMA and `isolated_network` is set nixl (an extra: `pip install tandem-serve[nixl]`); else tcp."""
    isolated_network: bool = False
    """Nobody but this cluster can reach the network between its workers. nixl and torch_dist neither encrypt nor
    authenticate what they move, nor do gloo and NCCL between the ranks of a worker on several `nodes`: off a single
    machine they start only with `true`."""
    lease_s: float = Field(default=2.0, ge=0.5, le=3600.0)
    """A hand-off whose peer is silent this long is given up. A live peer speaks every 0.1 s at best, so a much shorter
    lease would end by itself."""
    chunk_bytes: PositiveInt = 8 << 20
    """Most bytes under one checksum."""
    tcp_streams: int = Field(default=2, ge=1, le=16)
    """Connections of `tcp` from a prefill worker to a decode worker."""
    succession_s: float = Field(default=5.0, ge=0.0, le=600.0)
    """Most time, within its pool's `drain_s`, that a worker told to stop stays for another to fetch its cache; 0: it
    leaves as soon as its work is done."""
    tls: TlsConfig | None = None
    """KV over `tcp` in TLS 1.3, with certificates on both sides; in the clear when absent."""
    wire_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3"] = "auto"
    """What keys and values travel in where the receiver can convert them (over tcp): `auto` is the smaller of what the
    two workers cache in; over shared memory they always travel as they are to rest."""


class RouterConfig(RouterAccess):
    """The front doors and placement."""

    port: Port = 8000
    """HTTP port; 0: any free one."""
    grpc_port: Port = 8001
    """gRPC port; 0: any free one."""
    processes: int = Field(default=1, ge=1, le=64)
    """Router processes of one host that share its ports, for more cores. Each keeps a session to every worker; bounds
    such as `max_inflight_requests` are of each, limits of API keys are of all together."""
    connections: ConnectionsConfig = ConnectionsConfig()
    max_body_bytes: PositiveInt = 8 << 20
    """Largest request body, over HTTP and gRPC; files have a bound of their own, `batches.max_file_bytes`."""
    max_choices: PositiveInt = 16
    """Bound of `n`."""
    max_prompts: PositiveInt = 64
    """Prompts in one completions request."""
    max_answer_values: PositiveInt = 1 << 20
    """Tokens and their alternatives in an answer that is not streamed: prompts x n x max_tokens x (1 + logprobs)."""
    max_inflight_requests: PositiveInt = 1024
    """Requests that workers have at once; others wait in the queue."""
    max_queue_s: Seconds = 60.0
    """A request that is predicted to wait longer for its turn, or to get its first token after its own deadline, is
    refused at once with a time to come back."""
    queue: QueueConfig = QueueConfig()
    limits: LimitsConfig = LimitsConfig()
    hedging: HedgingConfig | None = None
    """null: none."""
    request_timeout_s: Seconds = 600.0
    """Longest time from a request's arrival to the end of its answer, or to the client's deadline if that is sooner."""
    local_prefill_tokens: int = Field(default=64, ge=0)
    """Uncached prompt tokens up to which the decode worker prefills itself, whatever a hand-off would cost."""
    max_local_prefill_tokens: int | None = Field(default=None, ge=0)
    """Uncached prompt tokens beyond which a decode worker never prefills while a prefill worker takes requests; null:
    whatever is predicted to cost less. The same number as `local_prefill_tokens`: that alone decides."""
    decisions_kept: int = Field(default=512, ge=0, le=65_536)
    """The last placements, shown at /debug/decisions to the tenant whose requests they were; 0: none, and there is no
    such page. Each takes some 100 bytes per worker."""
    max_attempts: PositiveInt = 4
    """Workers tried for one request before it fails."""
    worker_silence_s: float = Field(default=1.5, ge=0.5, le=86400.0)
    """A worker that says nothing for so long is taken for dead, and its streams continue elsewhere. A live one speaks
    every 0.25 s."""
    rejoin_s: Seconds = 60.0
    """For how long a stream whose decode worker died waits for one to come (back) when none is left; then it ends with
    503. Restarting a worker, model and all, should take less. What would only begin then waits in line, for
    `max_queue_s` at most, while a worker is expected: the last one was told to go, or one was lost, or named for the
    first time, less than `rejoin_s` ago; else it is refused at once."""
    takeover_s: float = Field(default=10.0, ge=0.0, le=600.0)
    """For how long workers go on with the streams of a router that is gone, for their clients to come to another with a
    `Last-Event-ID`; 0: not at all, then such a stream is generated again."""
    grammars: GrammarsConfig = GrammarsConfig()
    prompt_cache: PromptCacheConfig = PromptCacheConfig()
    quality: QualityConfig = QualityConfig()
    batches: BatchesConfig = BatchesConfig()
    handover_socket: str | None = None
    """Unix socket over which a router that stands alone hands its doors to its successor; null: one named after `port`,
    beside `control_socket`."""
    tool_parser: ToolParserName | None = None
    """Format of the model's tool calls; when absent it follows from the chat template."""
    reasoning_parser: ReasoningParserName | None = None
    """Marks around the model's reasoning; when absent they follow from the chat template; `none`: there are none."""
    stream_buffer_tokens: PositiveInt = 4096
    """Tokens waiting for a slow reader before its request is cancelled."""


class ClusterConfig(Section):
    """Everything."""

    model: ModelSection = ModelSection()
    engine: EngineSection = EngineSection()
    transfer: TransferConfig = TransferConfig()
    router: RouterConfig = RouterConfig()
    prefill: PoolConfig = PoolConfig()
    decode: PoolConfig = PoolConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    redis: RedisConfig = RedisConfig()
    ray: RayConfig = RayConfig()
    prices: PriceConfig = PriceConfig()
    profiling: ProfilingConfig = ProfilingConfig()
    secret: SecretStr | None = None
    """Keys block names and authenticates workers and routers to each other; `tandem up` draws one when absent."""
    standby_workers: int = Field(default=1, ge=0, le=16)
    """Processes that `tandem up` keeps on this machine beside the workers, with everything imported: a worker that dies
    is replaced by one of them, without the two seconds that imports take. Each takes about 250 MB; 0: none."""
    control_socket: str | None = None
    """Unix socket over which `tandem scale`, `flip` and `restart` ask `tandem up`; null: one named after `router.port`,
    in `$XDG_RUNTIME_DIR/tandem` or in the temporary folder."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log lines that are written, by every process."""
    log_format: Literal["text", "json"] = "text"
    """json: one object a line, with the request's id where a line is about one."""

    def engine_of(self, pool: PoolConfig) -> EngineSection:
        """The engine section with what the pool has of its own."""
        own = {name: value for name in ("block_size", "kv_dtype") if (value := getattr(pool, name)) is not None}
        return self.engine.model_copy(update=own)

    def mistaken_wire_dtype(self, dtype: str) -> str | None:
        """Why KV cannot travel as `transfer.wire_dtype` says when the model is computed in `dtype`. None: it can."""
        if not self.prefill.replicas or self.transfer.wire_dtype == AUTO_DTYPE:
            return None
        kv_dtypes = [self.engine_of(pool).kv_dtype for pool in (self.prefill, self.decode)]
        source, destination = (dtype if kv_dtype == AUTO_DTYPE else kv_dtype for kv_dtype in kv_dtypes)
        reason = cannot_travel_as(source, self.transfer.wire_dtype, destination)
        return reason and f"transfer.{reason}"

    def _no_disk_cache(self) -> str | None:
        return contradiction(
            has_path=self.engine.disk_cache_path is not None,
            disk_cache_bytes=self.engine.disk_cache_bytes,
            host_cache_bytes=self.engine.host_cache_bytes,
            num_ranks=max(pool.tensor_parallel_size for pool in (self.prefill, self.decode) if pool.replicas),
        )

    @model_validator(mode="after")
    def _addresses(self) -> Self:
        for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
            for index, address in enumerate(pool.addresses):
                try:
                    checked_address(address)
                except ValueError as error:
                    raise ValueError(f"{name}.addresses.{index}: {error}") from None
        return self

    @model_validator(mode="after")
    def _nodes(self) -> Self:
        for name, pool in (("prefill", self.prefill), ("decode", self.decode)):
            if reason := mistaken_nodes(pool):
                raise ValueError(f"{name}.{reason}")
            if pool.nodes > 1 and self.ray.address is not None:
                raise ValueError(f"{name}.nodes is {pool.nodes}: on Ray a worker's ranks are processes of one node")
            if pool.gpus is not None and self.ray.address is not None:
                raise ValueError(f"{name}.gpus: on Ray it is Ray that gives a worker its GPUs")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.decode.replicas < 1:
            raise ValueError("decode.replicas must be at least 1: only decode workers answer")
        if self.secret is not None and (reason := mistaken_secret(self.secret.get_secret_value())):
            raise ValueError(f"secret {reason}")
        smallest = min(self.engine_of(pool).block_size for pool in (self.prefill, self.decode) if pool.replicas)
        if reason := mistaken_context(self.model.max_model_len, self.engine.num_blocks, smallest):
            raise ValueError(reason)
        if self.router.port == self.router.grpc_port != 0:
            raise ValueError(f"router.port and router.grpc_port are both {self.router.port}")
        kv_dtypes = {self.engine_of(pool).kv_dtype for pool in (self.prefill, self.decode)}
        if self.prefill.replicas and {"int8", "fp8_e4m3"} <= kv_dtypes:
            raise ValueError("prefill.kv_dtype and decode.kv_dtype: codes are never made of other codes")
        dtype = BUILTIN_DTYPE if self.model.path == BUILTIN and self.model.dtype == AUTO_DTYPE else self.model.dtype
        # What `auto` stands for is known to whoever has the model: workers check it at their start.
        if dtype != AUTO_DTYPE and (reason := self.mistaken_wire_dtype(dtype)):
            raise ValueError(reason)
        keys_elsewhere = self.router.api_keys_file is not None
        if not keys_elsewhere and (reason := mistaken_keys(self.router.api_keys, self.router.limits)):
            raise ValueError(f"router.{reason}")
        if reason := self._no_disk_cache():
            raise ValueError(reason)
        try:
            self.redis.redis_settings()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if self.engine.prefill_chunk_tokens > self.engine.max_batched_tokens:
            raise ValueError("engine.prefill_chunk_tokens must not exceed engine.max_batched_tokens")
        return self


def load(path: Path | None, overrides: Mapping[str, Any] | None = None) -> ClusterConfig:
    """The configuration from `path` (defaults when None), then `TANDEM_*` variables, then `overrides`.

    `overrides` maps dotted names to values; None values are ignored.
    Raises ConfigError that names the field and what is wrong with it.
    """
    data = read_mapping(path) if path is not None else {}
    put_variables(data, os.environ)
    for dotted, value in (overrides or {}).items():
        if value is not None:
            put(data, dotted.split("."), value)
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        wrong = [_describe(one) for one in error.errors()]
        more = [f"and {len(wrong) - _MAX_LISTED_MISTAKES} more"] if len(wrong) > _MAX_LISTED_MISTAKES else []
        raise ConfigError("; ".join(wrong[:_MAX_LISTED_MISTAKES] + more)) from None


def _describe(error: ErrorDetails) -> str:
    """One mistake, beginning with the setting's name; those between sections name theirs in their own words."""
    name = ".".join(map(str, error["loc"]))
    told = error["msg"].removeprefix("Value error, ")
    if error["type"] in _BOUND_ERRORS:
        told += f"; it is {error['input']}"
    if error["type"] == "extra_forbidden":
        meant = _closest_setting(ClusterConfig, error["loc"])
        return f"{name}: there is no such setting" + (f"; did you mean {meant}?" if meant else "")
    return f"{name}: {told}" if name else told


def _setting_names(section: type[BaseModel], before: str = "") -> Iterator[str]:
    """All names below it, with dots; sections as well as what is in them."""
    for name, field in section.model_fields.items():
        yield before + name
        for inner in _sections_in(field.annotation):
            yield from _setting_names(inner, f"{before}{name}.")


def _closest_setting(section: type[BaseModel], wrong: Sequence[str | int]) -> str | None:
    """The setting that is most like a name that there is not: beside it, else of the same word elsewhere."""
    *parents, word = map(str, wrong)
    names = list(dict.fromkeys(_setting_names(section)))
    beside = {name.rpartition(".")[2]: name for name in names if name.split(".")[:-1] == parents}
    if found := get_close_matches(word, beside, n=1, cutoff=_MIN_SIMILARITY):
        return beside[found[0]]
    elsewhere = [name for name in names if name.rpartition(".")[2] == word]
    if len(elsewhere) == 1:
        return elsewhere[0]
    return next(iter(get_close_matches(".".join((*parents, word)), names, n=1, cutoff=_MIN_SIMILARITY)), None)


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Such as the one in `Section | None`; what is in lists and mappings has names of the user's own."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            yield one


def dump(config: ClusterConfig) -> str:
    """The configuration as YAML, secrets included: for the file that `tandem up` hands to its processes."""
    return yaml.safe_dump(_plain(config.model_dump()), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
