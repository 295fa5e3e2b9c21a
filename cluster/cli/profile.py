"""`tandem profile`: records a profile of a router or worker of a running cluster.

It needs `profiling.enabled` and an operator's key.
"""

import gzip
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import httpx

_MARGIN_S = 150.0
"""Seconds to wait beyond those requested: a worker's profiler takes a while to get ready and to write."""
_FORMATS = {".svg": "svg", ".json": "speedscope", ".txt": "collapsed"}


def profile(  # one parameter per option
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Output file; for a router .svg, .json (speedscope) or .txt.")
    ],
    router: Annotated[bool, typer.Option("--router", help="Record a flame graph of the router.")] = False,
    worker: Annotated[
        str | None, typer.Option(metavar="NAME", help="Record a trace of a worker, such as decode-0.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of engine steps, for a worker.")] = 20,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds to record; for a worker, at most.")] = 10.0,
    url: Annotated[str, typer.Option(help="HTTP address of the router.")] = "http://127.0.0.1:8000",
    api_key_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File with an operator's API key.")
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file of the certificate authority.")
    ] = None,
    client_cert: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file of the client certificate and key.")
    ] = None,
) -> None:
    """Record a profile of a router or worker, for Perfetto or chrome://tracing, speedscope, or a browser."""
    if router == (worker is not None):
        raise typer.BadParameter("give either --router or --worker NAME")
    if router and out.suffix not in _FORMATS:
        raise typer.BadParameter(
            f"{out.name} does not match any of {', '.join(f'*{one}' for one in _FORMATS)}", param_hint="--out"
        )
    if not out.absolute().parent.is_dir():  # otherwise this would fail only after recording
        raise typer.BadParameter(f"no such directory: {out.parent}", param_hint="--out")
    params: dict[str, str | float] = {"seconds": seconds}
    params |= {"format": _FORMATS[out.suffix]} if worker is None else {"worker": worker, "steps": steps}
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
            content, note = _fetch(client, base_of(url), path, params)
        out.write_bytes(gzip.decompress(content) if worker is not None and out.suffix != ".gz" else content)
    except (ClientError, ConfigError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    print(f"{out}{note}")


def _fetch(client: "httpx.Client", url: str, path: str, params: dict[str, str | float]) -> tuple[bytes, str]:
    """Return the file's content and a note on the number of steps. Raises ClientError."""
    import httpx

    from cluster.router_client import ClientError, refusal, unreachable

    try:
        answer = client.post(url + path, params=params)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(url, error) from None
    if answer.status_code != httpx.codes.OK:
        raise ClientError(refusal(answer))
    steps = answer.headers.get("X-Tandem-Steps")
    return answer.content, f": {steps} steps" if steps else ""
