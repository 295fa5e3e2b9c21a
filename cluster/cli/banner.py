"""The banner that `tandem up` prints once everything serves: model, pools, memory, addresses, settings, a curl line."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, SecretStr
from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cluster.control.server import control_path
from cluster.supervisor.process_view import ProcessView
from cluster.supervisor.supervisor import Role
from cluster.terminal_text import format_bytes
from tandem.config.cluster import ClusterConfig
from tandem.config.pools import PoolConfig
from tandem.rpc.hosts import join, reachable
from tandem.values.kv_layout import AUTO_DTYPE, may_differ_after_failover
from tandem.values.quantization import QUANTIZED_DTYPES

STOP_HINT = "Ctrl-C drains and stops; a second Ctrl-C kills"
EXAMPLE_QUESTION = "Tell me a short story about a fox."
EXAMPLE_BEGINNING = "Once upon a time there was a little fox"
EXAMPLE_TOKENS = 96
COMPLETES_NOTE = (
    "This model has no chat template: use it for text completion (/v1/completions, `tandem chat`, or the playground)."
)
POOLS_NOTE = "the pools quantize differently: a text depends on which pool computed the KV that it goes on from"
FAILOVER_NOTE = "text that resumes after a failover may differ; engine.deterministic prevents it"


def print_banner(
    console: Console, configured: ClusterConfig, effective: ClusterConfig, processes: Sequence[ProcessView]
) -> None:
    """Print the banner. `configured` is what the user configured, `effective` what runs."""
    model = model_name(effective, processes)
    body = Group(
        _summary(configured, effective, processes, model),
        Text(""),
        _pools(processes),
        Text(""),
        _urls(effective),
        *_settings(configured),
    )
    console.print(Panel(body, title="[bold]Tandem[/bold]", box=box.ROUNDED, expand=False, padding=(1, 2)))
    for warning in warnings(effective):
        console.print(Text(f"warning: {warning}", style="bold yellow"), soft_wrap=True)
    dtype = served_dtype(effective, processes)
    if may_differ_after_failover(dtype, deterministic=effective.engine.deterministic):
        console.print(Text(f"note: in {dtype} {FAILOVER_NOTE}", style="dim"), soft_wrap=True)
    if not effective.pools_quantize_alike or len(_weights_of_pools(effective, processes, dtype)) > 1:
        console.print(Text(f"note: {POOLS_NOTE}", style="dim"), soft_wrap=True)
    # Outside the panel and unwrapped, so that it can be pasted as it is.
    console.print("\nTry it:", style="bold")
    chats, task = has_chat_template(processes), served_task(processes)
    console.out(curl_line(effective, model, chats=chats, task=task), highlight=False)
    if not chats and task is None:
        console.print(Text(COMPLETES_NOTE, style="dim"), soft_wrap=True)
    console.print(f"\n{STOP_HINT}", style="dim")


def model_name(config: ClusterConfig, processes: Sequence[ProcessView]) -> str:
    """Return the name that clients use: as the workers report it, else as configured."""
    reported = next((str(p.ready["model"]) for p in processes if p.ready.get("model")), None)
    return config.model.name or reported or config.model.path.rstrip("/").rpartition("/")[2]


def served_dtype(config: ClusterConfig, processes: Sequence[ProcessView]) -> str:
    """Return the dtype that the workers compute in: as they report it, else as configured."""
    reported = next((str(p.ready["dtype"]) for p in processes if p.ready.get("dtype")), None)
    return reported or config.model.dtype


def base_url(config: ClusterConfig, port: int) -> str:
    """Return host:port to connect to from this machine, with loopback in place of a wildcard address."""
    return join(reachable(config.router.host), port)


def http_url(config: ClusterConfig) -> str:
    """Return the HTTP server's URL as seen from this machine."""
    scheme = "http" if config.router.tls is None else "https"
    return f"{scheme}://{base_url(config, config.router.port)}"


def has_chat_template(processes: Sequence[ProcessView]) -> bool:
    """Return whether the model has a chat template, as the routers report it."""
    return all(process.ready.get("has_chat_template", True) for process in processes)


def served_task(processes: Sequence[ProcessView]) -> str | None:
    """Return what the model makes in place of text, as the routers report it; None: it generates text."""
    return next((str(task) for process in processes if (task := process.ready.get("task"))), None)


def curl_line(config: ClusterConfig, model: str, *, chats: bool = True, task: str | None = None) -> str:
    """Return a request to paste into a shell, without any key, streaming where text is generated.

    `chats`: False for a plain completion; `task`: what the model makes in place of text.
    """
    generates = {"max_tokens": EXAMPLE_TOKENS, "stream": True}
    body: dict[str, Any]
    if task == "embed":
        route, body = "embeddings", {"model": model, "input": EXAMPLE_QUESTION}
    elif task is not None:
        route, body = "rerank", {"model": model, "query": EXAMPLE_QUESTION, "documents": [EXAMPLE_BEGINNING]}
    elif chats:
        messages = [{"role": "user", "content": EXAMPLE_QUESTION}]
        route, body = "chat/completions", {"model": model, "messages": messages, **generates}
    else:
        route, body = "completions", {"model": model, "prompt": EXAMPLE_BEGINNING, **generates}
    url = f"{http_url(config)}/v1/{route}"
    parts = ["curl -N", shlex.quote(url), "-H 'Content-Type: application/json'"]
    if (tls := config.router.tls) is not None:
        parts.append("--cacert ca.pem" if tls.client_ca is None else "--cacert ca.pem --cert client.pem")
    if config.router.api_keys or config.router.api_keys_file:
        parts.append('-H "Authorization: Bearer $API_KEY"')
    return " ".join([*parts, "-d", shlex.quote(json.dumps(body, ensure_ascii=False))])


def warnings(config: ClusterConfig) -> list[str]:
    """Return the warnings about this configuration."""
    found = [] if config.router.warning is None else [config.router.warning]
    if any(key.is_plain for key in config.router.api_keys):
        found.append("router.api_keys contains plain-text keys; store digests instead (`tandem key digest`)")
    return found


def changed_settings(config: BaseModel, defaults: BaseModel | None, prefix: str = "") -> dict[str, str]:
    """Return the settings that differ from their defaults, by dotted name; secrets stay hidden.

    `defaults` is None for a section that is absent by default: the defaults of its own fields are not listed.
    """
    found: dict[str, str] = {}
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        default = getattr(defaults, name) if defaults is not None else field.get_default(call_default_factory=True)
        if not isinstance(value, BaseModel):
            if value != default:
                found[f"{prefix}{name}"] = _shown(value)
            continue
        inner = changed_settings(value, default, f"{prefix}{name}.")
        found |= inner or ({f"{prefix}{name}": "with defaults"} if default is None else {})
    return found


def _shown(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return ", ".join(_shown(item) for item in value)
    if isinstance(value, SecretStr):
        return "(hidden)"
    if isinstance(value, BaseModel):
        changed = changed_settings(value, None)
        switches = "".join(f" ({name})" for name, text in changed.items() if text == "true")
        return " of ".join(text for text in changed.values() if text != "true") + switches
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_shown_entry(part)}" for key, part in value.items())
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _shown_entry(value: Any) -> str:
    if not isinstance(value, BaseModel):
        return _shown(value)
    return " and ".join(f"{name} {text}" for name, text in changed_settings(value, None).items()) or "no limit"


def _summary(configured: ClusterConfig, config: ClusterConfig, processes: Sequence[ProcessView], model: str) -> Table:
    table = Table.grid(padding=(0, 2))
    context = next((p.ready["max_model_len"] for p in processes if p.ready.get("max_model_len")), None)
    table.add_row("model", Text(model, style="bold cyan"))
    dtype = served_dtype(config, processes)
    chosen = " (auto)" if configured.model.dtype == AUTO_DTYPE != dtype else ""
    table.add_row("", Text(f"{config.model.path} · {dtype}{chosen}", style="dim"))
    weights = _weights_of_pools(config, processes, dtype)
    for text, where in weights.items():
        table.add_row("weights", Text(text if len(weights) == 1 else f"{text} ({', '.join(where)})"))
    if context is not None:
        table.add_row("context", Text(f"{context} tokens"))
    pools = {"prefill": config.prefill, "decode": config.decode}
    counts = [f"{pool.replicas} {name}{_ranks(pool)}" for name, pool in pools.items()]
    table.add_row("pools", Text(f"{' + '.join(counts)}, KV by {config.transfer.transport}"))
    return table


def _weights_of_pools(config: ClusterConfig, processes: Sequence[ProcessView], dtype: str) -> dict[str, list[str]]:
    """What a quantized checkpoint's weights have become, and in which pools."""
    found: dict[str, list[str]] = {}
    for name, pool in {"prefill": config.prefill, "decode": config.decode}.items():
        quantization = config.engine_of(pool).quantization
        for process in processes:
            if process.role.value == name and process.ready.get("weight_format"):
                found.setdefault(_weights(process.ready, quantization, dtype), []).append(name)
                break
    return found


def _weights(ready: Mapping[str, Any], quantization: str, dtype: str) -> str:
    name = ready["weight_format"]
    if quantization in QUANTIZED_DTYPES:
        return f"restored to {dtype} from {name}, then quantized as {quantization}"
    if kept := ready.get("matrices_as_stored"):
        return f"{name}: {kept} matrices are multiplied as stored, any others restored to {dtype}"
    return f"restored to {dtype} from {name}"


def _ranks(pool: PoolConfig) -> str:
    return f" of {pool.tensor_parallel_size} ranks each" if pool.tensor_parallel_size > 1 else ""


def _pools(processes: Sequence[ProcessView]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    # Fits a terminal of 80 columns: text that is cut off here cannot be read anywhere else.
    table.add_column("process", overflow="fold")
    table.add_column("pid", no_wrap=True, min_width=7)
    table.add_column("address", no_wrap=True)
    has_gpus = any(view.ready.get("gpus") for view in processes)
    for column in (*(("GPU",) if has_gpus else ()), "blocks", "KV", "weights"):
        table.add_column(column, justify="right", no_wrap=True)
    for view in processes:
        name = view.name if view.worker_id == view.name else f"{view.name} ({view.worker_id})"
        table.add_row(
            Text(name), str(view.pid), Text(view.address), *([_gpus(view)] if has_gpus else []), *_memory(view)
        )
    return table


def _gpus(view: ProcessView) -> str:
    """Render a worker's GPUs: `0,1`, or `0 1/2` for one that two workers share."""
    gpus, sharers = view.ready.get("gpus") or [], int(view.ready.get("gpu_sharers", 1))
    return ",".join(map(str, gpus)) + (f" 1/{sharers}" if gpus and sharers > 1 else "")


def _memory(view: ProcessView) -> list[str]:
    ready = view.ready
    if view.role is Role.ROUTER or "num_blocks" not in ready:
        return [""] * 3
    blocks, size = int(ready["num_blocks"]), int(ready.get("block_size", 0))
    return [
        f"{blocks} × {size}",
        format_bytes(float(ready.get("kv_bytes", 0))),
        format_bytes(float(ready.get("weights_bytes", 0))),
    ]


def _urls(config: ClusterConfig) -> Table:
    http = http_url(config)
    table = Table.grid(padding=(0, 2))
    table.add_row("HTTP", Text(f"{http}/v1", style="cyan"))
    table.add_row("gRPC", Text(base_url(config, config.router.grpc_port), style="cyan"))
    table.add_row("page", Text(f"{http}/", style="cyan"))
    table.add_row("metrics", Text(f"{http}/metrics", style="cyan"))
    table.add_row("control", Text(str(control_path(config)), style="cyan"))
    return table


def _settings(configured: ClusterConfig) -> list[Text | Table]:
    changed = changed_settings(configured, ClusterConfig())
    if not changed:
        return []
    table = Table.grid(padding=(0, 2))
    for name, value in changed.items():
        table.add_row(Text(name, style="dim"), Text(value))
    return [Text(""), Text("settings (only what differs from the defaults)", style="bold"), table]
