"""The `tandem` command. Only what a command needs is imported, and only when it runs, so that help appears at once."""

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from cluster.cli.autoscale import autoscale
from cluster.cli.cert import cert
from cluster.cli.doctor import doctor
from cluster.cli.fleet import abort, flip, ps, restart, scale
from cluster.cli.key import key
from cluster.cli.processes import become, decode, follower, prefill, router
from cluster.cli.profile import profile
from cluster.cli.quantize import quantize
from cluster.cli.simulate import plan, simulate
from tandem.config.source.regular_file import read_regular_text
from tandem.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_URL = "http://127.0.0.1:8000"
_SHOWN = (
    "the password in --redis is visible to every user in this machine's process list; "
    "use redis.password in the YAML or TANDEM_REDIS__PASSWORD__FILE instead"
)
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130
_RUN, _CHANGE, _PROCESSES = "Run a cluster here", "Change a running cluster", "Run one process"
_TALK, _LOOK, _SECURE = "Use a cluster", "Inspect and measure", "Make keys and certificates"
_MODELS = "Prepare a model"

app = typer.Typer(
    name="tandem",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", help="The cluster's YAML.", rich_help_panel="Configuration")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="DIR_FILE_OR_HUB_ID",
        help="Directory in Hugging Face layout, .gguf file, or a hub id; default: the built-in model.",
        rich_help_panel="Model",
    ),
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="auto|float32|bfloat16|float16",
        help="Compute and KV dtype; auto: the checkpoint's.",
        rich_help_panel="Model",
    ),
]
PrefillOption = Annotated[
    int | None, typer.Option("--prefill", metavar="N", help="Number of prefill workers.", rich_help_panel="Pools")
]
DecodeOption = Annotated[
    int | None, typer.Option("--decode", metavar="N", help="Number of decode workers.", rich_help_panel="Pools")
]
TransportOption = Annotated[
    str | None,
    typer.Option(
        "--transport",
        metavar="NAME",
        help="KV transport: auto, shm, tcp, nixl, torch_dist or cuda_ipc.",
        rich_help_panel="Pools",
    ),
]
KeyFileOption = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="File with the API key.")]
CaOption = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file of the router's certificate authority.")
]
ClientCertOption = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file of the client certificate and key.")
]


def _show_version(requested: bool) -> None:
    if requested:
        from cluster.distribution import version_line

        print(version_line())
        raise typer.Exit


@app.callback()
def tandem(
    _version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the versions and exit.")
    ] = False,
) -> None:
    """Serve a large language model from two pools of workers: prefill reads prompts, decode writes answers."""


@app.command(rich_help_panel=_RUN)
def up(  # noqa: PLR0913  # one parameter per option
    *,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", rich_help_panel="Servers")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port; 0: any free port.", rich_help_panel="Servers")] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="gRPC port; 0: any free port.", rich_help_panel="Servers")
    ] = None,
    prefill: PrefillOption = None,
    decode: DecodeOption = None,
    transport: TransportOption = None,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Redis shared by routers and workers, such as redis://host:6379; rediss:// for TLS.",
            rich_help_panel="Pools",
        ),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="auto|HOST:PORT|local",
            help="Run the workers on this Ray cluster; their resources are set under [b]ray[/b].",
            rich_help_panel="Pools",
        ),
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Start a whole cluster on this machine and keep it running. Ctrl-C drains and stops it."""
    from rich.console import Console

    from cluster.cli.up import serve
    from tandem.config.cluster import load

    overrides = {
        **_overrides(model, dtype, prefill, decode, transport),
        "router.host": host,
        "router.port": port,
        "router.grpc_port": grpc_port,
        "redis.url": redis,
        "ray.address": ray,
    }
    again = partial(load, config, overrides)
    loaded, out, err = again(), Console(highlight=False), _complaints(redis)
    if loaded.ray.address is None:
        raise typer.Exit(asyncio.run(serve(loaded, out=out, err=err, again=again)))
    from cluster.ray.launcher import open_launcher

    with open_launcher(loaded.ray.address, loaded.model.path, warn=partial(_warn, err)) as launcher:
        raise typer.Exit(asyncio.run(serve(loaded, out=out, err=err, launcher=launcher, again=again)))


@app.command(rich_help_panel=_RUN)
def demo(
    *,
    model: ModelOption = None,
    dtype: DtypeOption = None,
    prefill: PrefillOption = None,
    decode: DecodeOption = None,
    transport: TransportOption = None,
    config: ConfigOption = None,
) -> None:
    """Start a cluster on free ports, ask one question through both pools, show where the time went, and stop."""
    from rich.console import Console

    from cluster.cli.demo import demo as run_demo
    from tandem.config.cluster import load

    overrides = _overrides(model, dtype, prefill, decode, transport) | {"router.port": 0, "router.grpc_port": 0}
    err = Console(stderr=True, highlight=False)
    raise typer.Exit(asyncio.run(run_demo(load(config, overrides), out=Console(highlight=False), err=err)))


def _complaints(redis: str | None) -> "Console":
    """Return a console for errors and warnings, after warning of a password in `--redis`."""
    from rich.console import Console

    err = Console(stderr=True, highlight=False)
    if redis is not None and urlsplit(redis).password is not None:
        _warn(err, _SHOWN)
    return err


def _warn(console: "Console", message: str) -> None:
    from rich.text import Text

    console.print(Text(f"warning: {message}", style="bold yellow"), soft_wrap=True)


def _overrides(
    model: str | None, dtype: str | None, prefill: int | None, decode: int | None, transport: str | None
) -> dict[str, Any]:
    return {
        "model.path": model,
        "model.dtype": dtype,
        "prefill.replicas": prefill,
        "decode.replicas": decode,
        "transfer.transport": transport,
    }


for process in (router, prefill, decode, follower):
    app.command(rich_help_panel=_PROCESSES)(process)


@app.command(rich_help_panel=_TALK)
def chat(
    url: Annotated[str, typer.Option(help="HTTP address of the router.")] = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="A LoRA adapter, by name. Default: the model itself.")] = None,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum tokens per answer.")] = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 always picks the likeliest token.")
    ] = 0.0,
    api_key_file: KeyFileOption = None,
    ca: CaOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """Chat with a running cluster; from a pipe, ask one question per line."""
    from cluster.cli.chat import Conversation
    from cluster.cli.chat import chat as run_chat
    from cluster.router_client import ChatClient, ClientError, client_tls

    key = _key_of(api_key_file)

    async def talk() -> int:
        async with ChatClient(url, api_key=key, tls=client_tls(ca, client_cert)) as client:
            talk_with = Conversation(system=system)
            return await run_chat(client, talk_with, model=model, max_tokens=max_tokens, temperature=temperature)

    try:
        code = asyncio.run(talk())
    except ClientError as error:
        _complain(str(error))
        code = 1
    raise typer.Exit(code)


@app.command(rich_help_panel=_TALK)
def top(
    url: Annotated[
        list[str] | None,
        typer.Option(help="HTTP address of a router; may be repeated for several routers of one cluster."),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between updates.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print once and exit; implied when the output is not a terminal.")
    ] = False,
    api_key_file: KeyFileOption = None,
    ca: CaOption = None,
    client_cert: ClientCertOption = None,
) -> None:
    """Watch a running cluster: pools, queues, KV use, hand-offs, throughput. [b]q[/b] quits, [b]s[/b] sorts."""
    from rich.console import Console

    from cluster.router_client import ChatClient, ClientError, client_tls
    from cluster.top.app import top as run_top

    console, key = Console(highlight=False), _key_of(api_key_file)
    once = once or not console.is_terminal
    try:
        clients = [ChatClient(one, api_key=key, tls=client_tls(ca, client_cert)) for one in url or [DEFAULT_URL]]
        code = asyncio.run(run_top(clients, interval_s=interval, once=once, console=console))
    except ClientError as error:
        _complain(str(error))
        code = 1
    raise typer.Exit(code)


@app.command(
    rich_help_panel=_TALK,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def bench(context: typer.Context) -> None:
    """Benchmark a cluster, as [bold]python -m tandem_bench[/bold] does, which documents its options."""
    become(["tandem_bench", *context.args])


@app.command(
    "eval",
    rich_help_panel=_LOOK,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
)
def evaluate(context: typer.Context) -> None:
    """Measure the quality that a model or its quantization loses, as [bold]python -m tandem_bench.quality[/bold] does,
    which documents its options; 1 is returned beyond a limit.
    """
    become(["tandem_bench.quality", *context.args])


for change in (scale, flip, restart, abort, autoscale):
    app.command(rich_help_panel=_CHANGE)(change)
for look in (ps, doctor, profile, simulate, plan):
    app.command(rich_help_panel=_LOOK)(look)
app.command(rich_help_panel=_MODELS)(quantize)
for secure in (cert, key):
    app.command(rich_help_panel=_SECURE)(secure)


@app.command(rich_help_panel=_LOOK)
def version() -> None:
    """Print the versions of Tandem, Python and torch."""
    _show_version(requested=True)


def _key_of(file: Path | None) -> str | None:
    try:
        return read_regular_text(file).strip() if file else None
    except ConfigError as error:
        _complain(str(error))
        raise typer.Exit(EXIT_CONFIG) from None


def _complain(message: str) -> None:
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True, highlight=False).print(Text(f"error: {message}", style="red"), soft_wrap=True)


def main() -> None:
    """Run the `tandem` command."""
    try:
        app()
    except ConfigError as error:
        _complain(str(error))
        sys.exit(EXIT_CONFIG)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
