"""`tandem profile`: what a router or a worker of a running cluster does, into a file. Wants `profiling.enabled` and an
operator's key."""

import gzip
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import httpx

_MARGIN_S = 150.0
"""Beyond the seconds that were asked for: a worker's profiler takes its time to get ready and to write."""
_FORMATS = {".svg": "svg", ".json": "speedscope", ".txt": "collapsed"}


def profile(  # one parameter per option
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="File; a router's as .svg, .json (speedscope) or .txt.")],
    router: Annotated[bool, typer.Option("--router", help="A flame graph of the router.")] = False,
    worker: Annotated[str | None, typer.Option(metavar="NAME", help="A trace of a worker, such as decode-0.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the worker's engine.")] = 20,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="So long; of a worker at most, if its steps take longer.")
    ] = 10.0,
    url: Annotated[str, typer.Option(help="The router's HTTP address.")] = "http://127.0.0.1:8000",
    api_key_file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="An operator's key.")] = None,
    ca: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file of the authority.")] = None,
    client_cert: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file of your certificate and its key.")
    ] = None,
) -> None:
    """Record what a router or a worker does; for Perfetto or chrome://tracing, speedscope, or a browser."""
    if router == (worker is not None):
        raise typer.BadParameter("either --router or --worker NAME")
    if router and out.suffix not in _FORMATS:
        raise typer.BadParameter(
            f"{out.name} is none of {', '.join(f'*{one}' for one in _FORMATS)}", param_hint="--out"
        )
    if not out.absolute().parent.is_dir():  # else this would come out when all is recorded
        raise typer.BadParameter(f"there is no folder {out.parent}", param_hint="--out")
    asked: dict[str, str | float] = {"seconds": seconds}
    asked |= {"format": _FORMATS[out.suffix]} if worker is None else {"worker": worker, "steps": steps}
    path = "/debug/profile/router" if worker is None else "/debug/profile/worker"
    import httpx

    from cluster.router_client import ClientError, base_of, client_tls
    from tandem.config.source.regular_file import read_regular_text
    from tandem.errors import ConfigError

    try:
        headers = {"Authorization": f"Bearer {read_regular_text(api_key_file).strip()}"} if api_key_file else {}
        tls = client_tls(ca, client_cert)
        patience = httpx.Timeout(seconds + _MARGIN_S)
        verify = True if tls is None else tls
        with httpx.Client(timeout=patience, trust_env=False, verify=verify, headers=headers) as client:
            content, note = _fetch(client, base_of(url), path, asked)
        out.write_bytes(gzip.decompress(content) if worker is not None and out.suffix != ".gz" else content)
    except (ClientError, ConfigError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    print(f"{out}{note}")


def _fetch(client: "httpx.Client", url: str, path: str, asked: dict[str, str | float]) -> tuple[bytes, str]:
    """The file, and how many steps it has. Raises ClientError."""
    import httpx

    from cluster.router_client import ClientError, refusal, unreachable

    try:
        answer = client.post(url + path, params=asked)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(url, error) from None
    if answer.status_code != httpx.codes.OK:
        raise ClientError(refusal(answer))
    steps = answer.headers.get("X-Tandem-Steps")
    return answer.content, f": {steps} steps" if steps else ""
