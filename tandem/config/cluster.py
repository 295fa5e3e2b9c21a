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
from tandem.config.admission import HedgingConfig, LimitsConfig, QueueConfig, keys_problem
from tandem.config.batches import BatchesConfig
from tandem.config.cluster_tls import ClusterSection
from tandem.config.engine import EngineSection, ModelSection
from tandem.config.pools import (
    PoolConfig,
    Port,
    context_problem,
    health_port_problem,
    health_ports_problem,
    nodes_problem,
)
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
from tandem.config.source.environment import put_variables, set_value
from tandem.config.source.yaml_file import read_mapping
from tandem.config.telemetry import ProfilingConfig, TelemetryConfig
from tandem.errors import ConfigError
from tandem.model_path import BUILTIN, BUILTIN_DTYPE
from tandem.rpc.hosts import checked_address
from tandem.rpc.mutual_tls import TlsFiles
from tandem.values.block_hash import secret_problem
from tandem.values.disk_cache import contradiction
from tandem.values.kv_agreement import cannot_travel_as
from tandem.values.kv_layout import AUTO_DTYPE

_MAX_LISTED_MISTAKES = 16
"""Maximum number of mistakes that one error lists."""
_MIN_SIMILARITY = 0.7
"""Minimum similarity of names by `difflib`: a letter more, less or swapped in a short name."""
_BOUND_ERRORS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
"""Types of validation errors about numbers, whose values are not secret and may be shown."""


class TlsConfig(Section):
    """PEM files of a worker, at the same paths on every host. Either every worker of the cluster has them or none."""

    cert: str
    """The certificate, followed by any intermediate certificates."""
    key: str
    """The certificate's private key, unencrypted."""
    ca: str
    """CA certificate. It must be a private CA that signs certificates for these workers only."""

    def files(self) -> TlsFiles:
        return TlsFiles(cert=Path(self.cert), key=Path(self.key), ca=Path(self.ca), setting="transfer.tls")


class TransferConfig(Section):
    """Transfer of KV between workers."""

    transport: Literal["auto", "cuda_ipc", "shm", "nixl", "torch_dist", "tcp"] = "auto"
    """`auto` picks the fastest transport that both workers support: on one host cuda_ipc between GPUs, else shm; nixl
    where both have RDMA and `isolated_network` is true (needs `pip install tandem-serve[nixl]`); else tcp."""
    isolated_network: bool = False
    """Whether only this cluster can reach the network between its workers. nixl and torch_dist neither encrypt nor
    authenticate what they move, nor do gloo and NCCL between the ranks of a worker on several `nodes`: across
    machines they start only when this is true."""
    lease_s: float = Field(default=2.0, ge=0.5, le=3600.0)
    """A hand-off fails when its peer has been silent for this long. Peers send a heartbeat every 0.1 s at best, so a
    much shorter lease would expire by itself."""
    chunk_bytes: PositiveInt | None = None
    """Maximum number of bytes under one checksum. null: 64 MiB over cuda_ipc and over nixl into GPUs, else 8 MiB."""
    tcp_streams: int = Field(default=2, ge=1, le=16)
    """TCP connections from a prefill worker to a decode worker, with `tcp`."""
    succession_s: float = Field(default=5.0, ge=0.0, le=600.0)
    """Maximum time, within its pool's `drain_s`, that a stopping worker stays so that others can fetch its cache. 0:
    it exits as soon as its work is done."""
    tls: TlsConfig | None = None
    """Encrypt KV over `tcp` with mutual TLS 1.3 and these certificates. null: with those of `cluster.tls`, or
    unencrypted where there are none or its mode is `permissive`."""
    wire_dtype: Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8_e4m3", "int4"] = "auto"
    """Data type of keys and values on the wire where the receiver can convert them (over tcp). `auto`: the smaller of
    the two workers' cache types. Over shared memory they always have the receiver's type."""


class RouterConfig(RouterAccess):
    """HTTP and gRPC servers, admission and placement."""

    port: Port = 8000
    """HTTP port. 0: any free port."""
    grpc_port: Port = 8001
    """gRPC port. 0: any free port."""
    processes: int = Field(default=1, ge=1, le=64)
    """Router processes on one host that share its ports, to use more cores. Each has a session to every worker; limits
    such as `max_inflight_requests` apply to each process, limits of API keys to all of them together."""
    connections: ConnectionsConfig = ConnectionsConfig()
    max_body_bytes: PositiveInt = 8 << 20
    """Maximum size of a request body, over HTTP and gRPC. Uploaded files have their own limit,
    `batches.max_file_bytes`."""
    max_choices: PositiveInt = 16
    """Maximum value of `n`."""
    max_prompts: PositiveInt = 64
    """Maximum number of prompts in one completions request."""
    tokenizer_cache_bytes: int = Field(default=64 << 20, ge=0)
    """Memory of each router process for the token ids of conversations' beginnings, so that a history is not tokenized
    again with each turn. Tenants share it as they share `prompt_cache`. 0: none."""
    max_answer_values: PositiveInt = 1 << 20
    """Maximum number of tokens and alternatives in a response that is not streamed:
    prompts x n x max_tokens x (1 + logprobs)."""
    max_inflight_requests: PositiveInt = 1024
    """Maximum number of requests that workers process at once; further ones wait in the queue."""
    max_queue_s: Seconds = 60.0
    """A request that is predicted to queue for longer than this, or to get its first token after its own deadline, is
    rejected at once with a Retry-After."""
    queue: QueueConfig = QueueConfig()
    limits: LimitsConfig = LimitsConfig()
    hedging: HedgingConfig | None = None
    """null: no hedging."""
    request_timeout_s: Seconds = 600.0
    """Maximum time from a request's arrival to the end of its response; the client's deadline applies if it is
    sooner."""
    local_prefill_tokens: int = Field(default=64, ge=0)
    """Prompts with at most this many uncached tokens are prefilled by the decode worker, whatever a hand-off would
    cost."""
    max_local_prefill_tokens: int | None = Field(default=None, ge=0)
    """Prompts with more uncached tokens than this are never prefilled by a decode worker while a prefill worker accepts
    requests. null: whichever is predicted to cost less. Equal to `local_prefill_tokens`: prompt length alone
    decides."""
    decisions_kept: int = Field(default=512, ge=0, le=65_536)
    """How many recent placement decisions /debug/decisions shows, to the tenant whose requests they were. 0: none, and
    the page does not exist. Each takes about 100 bytes per worker."""
    max_attempts: PositiveInt = 4
    """Maximum number of workers tried for one request before it fails."""
    worker_silence_s: float = Field(default=1.5, ge=0.5, le=86400.0)
    """A worker that has been silent for this long is considered dead, and its streams continue on other workers.
    Workers send a heartbeat every 0.25 s. With more than 500 workers it is rarer, but at least two come in this time,
    and two a second."""
    rejoin_s: Seconds = 60.0
    """How long a stream whose decode worker died waits for a worker when none is left; then it ends with 503. Starting
    a worker, model loading included, should take less. New requests wait in the queue, for at most `max_queue_s`, while
    a worker is expected: the last one was stopped, or one was lost or first announced less than `rejoin_s` ago.
    Otherwise they are rejected at once."""
    takeover_s: float = Field(default=10.0, ge=0.0, le=600.0)
    """How long workers continue the streams of a router that is gone, so that clients can resume them at another router
    with `Last-Event-ID`. 0: not at all; such a stream is then generated again."""
    grammars: GrammarsConfig = GrammarsConfig()
    prompt_cache: PromptCacheConfig = PromptCacheConfig()
    quality: QualityConfig = QualityConfig()
    batches: BatchesConfig = BatchesConfig()
    handover_socket: str | None = None
    """Unix socket over which a single router process passes its listening sockets to its successor. null: one named
    after `port`, next to `control_socket`."""
    tool_parser: ToolParserName | None = None
    """Format of the model's tool calls. null: derived from the chat template."""
    reasoning_parser: ReasoningParserName | None = None
    """Markers around the model's reasoning. null: derived from the chat template; `none`: the model has none."""
    stream_buffer_tokens: PositiveInt = 4096
    """Tokens buffered for a slow client before its request is cancelled."""


class ClusterConfig(Section):
    """The whole configuration file: one section for each part of the cluster."""

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
    cluster: ClusterSection = ClusterSection()
    secret: SecretStr | None = None
    """Secret that keys block names and authenticates workers and routers to each other. null: `tandem up` generates
    one."""
    standby_workers: int = Field(default=1, ge=0, le=16)
    """Number of processes that `tandem up` keeps ready on this machine with everything imported, so that replacing a
    dead worker does not wait two seconds for imports. Each takes about 250 MB. 0: none."""
    control_socket: str | None = None
    """Unix socket over which `tandem scale`, `flip` and `restart` reach `tandem up`. null: one named after
    `router.port`, in `$XDG_RUNTIME_DIR/tandem` or in the temporary directory."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum severity of log lines, in every process."""
    log_format: Literal["text", "json"] = "text"
    """`json`: one object per line, with the request id where a line is about a request."""

    def engine_of(self, pool: PoolConfig) -> EngineSection:
        """The engine section with what the pool has of its own."""
        own = {
            name: value
            for name in ("block_size", "kv_dtype", "quantization")
            if (value := getattr(pool, name)) is not None
        }
        return self.engine.model_copy(update=own)

    @property
    def pools_quantize_alike(self) -> bool:
        """Whether neither pool quantizes weights that the other leaves as they are, or in another way."""
        found = {self.engine_of(pool).quantization for pool in (self.prefill, self.decode)}
        return not self.prefill.replicas or len(found) == 1 or found <= {"auto", "stored", "none"}

    def wire_dtype_problem(self, dtype: str) -> str | None:
        """Reason why KV cannot be sent as `transfer.wire_dtype` when the model computes in `dtype`; None if it can."""
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

    def _no_windows_apart(self) -> str | None:
        if self.engine.windowed_layers == "together":
            return None
        for name in ("offload_bytes", "host_cache_bytes", "disk_cache_bytes"):
            if value := getattr(self.engine, name):
                return (
                    f"engine.windowed_layers is apart, and engine.{name} is {value}: lower tiers keep whole blocks only"
                )
        nodes = {name: pool.nodes for name, pool in (("prefill", self.prefill), ("decode", self.decode))}
        for name, count in nodes.items():
            if count > 1:
                return f"engine.windowed_layers is apart, and {name}.nodes is {count}: it must be 1"
        return None

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
            if reason := nodes_problem(pool) or health_port_problem(pool):
                raise ValueError(f"{name}.{reason}")
            if pool.nodes > 1 and self.ray.address is not None:
                raise ValueError(
                    f"{name}.nodes must be 1 on Ray, got {pool.nodes}: all ranks of a worker run on one node"
                )
            if pool.gpus is not None and self.ray.address is not None:
                raise ValueError(f"{name}.gpus cannot be set on Ray, which assigns GPUs to workers")
        # On Ray workers of both pools may be on different nodes.
        if self.ray.address is None and (
            reason := health_ports_problem({"prefill": self.prefill, "decode": self.decode})
        ):
            raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _pools_needed(self) -> Self:
        if self.decode.replicas < 1:
            raise ValueError("decode.replicas must be at least 1: only decode workers produce tokens")
        if self.router.quality.shadow_share and not self.prefill.replicas:
            raise ValueError("router.quality.shadow_share compares the pools and needs prefill.replicas, got 0")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.secret is not None and (reason := secret_problem(self.secret.get_secret_value())):
            raise ValueError(f"secret {reason}")
        smallest = min(self.engine_of(pool).block_size for pool in (self.prefill, self.decode) if pool.replicas)
        if reason := context_problem(self.model.max_model_len, self.engine.num_blocks, smallest):
            raise ValueError(reason)
        if self.router.port == self.router.grpc_port != 0:
            raise ValueError(f"router.port and router.grpc_port are both {self.router.port}")
        codes = {self.engine_of(pool).kv_dtype for pool in (self.prefill, self.decode)} - {AUTO_DTYPE}
        if self.prefill.replicas and len(codes) > 1:
            one, other = sorted(codes)
            raise ValueError(
                f"prefill.kv_dtype and decode.kv_dtype: {one} and {other} cannot be converted into each other"
            )
        dtype = BUILTIN_DTYPE if self.model.path == BUILTIN and self.model.dtype == AUTO_DTYPE else self.model.dtype
        # Only workers have the model and know what `auto` stands for: they check it at their start.
        if dtype != AUTO_DTYPE and (reason := self.wire_dtype_problem(dtype)):
            raise ValueError(reason)
        keys_elsewhere = self.router.api_keys_file is not None
        if not keys_elsewhere and (reason := keys_problem(self.router.api_keys, self.router.limits)):
            raise ValueError(f"router.{reason}")
        if self.engine.disk_cache_bytes and not self.pools_quantize_alike:
            raise ValueError(
                "prefill.quantization and decode.quantization differ, and a disk cache (engine.disk_cache_bytes) would"
                " outlive that difference"
            )
        if reason := self._no_disk_cache() or self._no_windows_apart():
            raise ValueError(reason)
        try:
            self.redis.redis_settings()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        if self.engine.prefill_chunk_tokens > self.engine.max_batched_tokens:
            raise ValueError("engine.prefill_chunk_tokens must not exceed engine.max_batched_tokens")
        return self


def load(path: Path | None, overrides: Mapping[str, Any] | None = None) -> ClusterConfig:
    """Load the configuration from `path` (defaults when None), then `TANDEM_*` variables, then `overrides`.

    `overrides` maps dotted names to values; None values are ignored. Raises ConfigError that names the field and what
    is wrong with it.
    """
    data = read_mapping(path) if path is not None else {}
    put_variables(data, os.environ)
    for dotted, value in (overrides or {}).items():
        if value is not None:
            set_value(data, dotted.split("."), value)
    try:
        return ClusterConfig.model_validate(data)
    except ValidationError as error:
        wrong = [_describe(one) for one in error.errors()]
        more = [f"and {len(wrong) - _MAX_LISTED_MISTAKES} more"] if len(wrong) > _MAX_LISTED_MISTAKES else []
        raise ConfigError("; ".join(wrong[:_MAX_LISTED_MISTAKES] + more)) from None


def _describe(error: ErrorDetails) -> str:
    """One mistake, beginning with the setting's name; mistakes between sections name their settings themselves."""
    name = ".".join(map(str, error["loc"]))
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] in _BOUND_ERRORS:
        message += f", got {error['input']}"
    if error["type"] == "extra_forbidden":
        meant = _closest_setting(ClusterConfig, error["loc"])
        return f"{name}: unknown setting" + (f"; did you mean {meant}?" if meant else "")
    return f"{name}: {message}" if name else message


def _setting_names(section: type[BaseModel], before: str = "") -> Iterator[str]:
    """Yield the dotted names of all sections and settings below a section."""
    for name, field in section.model_fields.items():
        yield before + name
        for inner in _sections_in(field.annotation):
            yield from _setting_names(inner, f"{before}{name}.")


def _closest_setting(section: type[BaseModel], wrong: Sequence[str | int]) -> str | None:
    """The setting whose name is most similar to an unknown one: in the same section, else with the same last word."""
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
    """Yield the sections in an annotation such as `Section | None`; keys of mappings are the user's own."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            yield one


def dump(config: ClusterConfig) -> str:
    """Return the whole configuration as YAML, secrets included."""
    return yaml.safe_dump(_plain(config.model_dump()), sort_keys=False)


def dump_for_processes(config: ClusterConfig) -> str:
    """Return the configuration as YAML, secrets included: for the file that `tandem up` hands to its processes.

    A null that is the default is left out: the version before may not know the key, or may refuse null for it.
    """
    return yaml.safe_dump(_plain(config), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        given = {name: getattr(value, name) for name in fields}
        return {k: _plain(v) for k, v in given.items() if v is not None or fields[k].default is not None}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value
