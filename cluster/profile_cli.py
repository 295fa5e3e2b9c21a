"""`tandem profile`: what a router or a worker of a running cluster does, into a file. Wants `profiling.enabled` and an
operator's key."""

import gzip
from pathlib import Path
from typing import Annotated

import typer

_MARGIN_S = 150.0
"""Beyond the seconds that were asked for: a worker's profiler takes its time to get ready and to write."""
_FORMATS = {".svg": "svg", ".json": "speedscope", ".txt": "collapsed"}


def profile(  # one parameter per option
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="File; a router's as .svg, .json (speedscope) or .txt.")],
    router: Annotated[bool, typer.Option("--router", help="A flame graph of the router.")] = False,
    worker: Annotated[str | None, typer.Option(metavar="NAME", help="A trace of a worker, such as decode-0.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Of the worker's engine.")] = 20,
    seconds: Annotated[float, typer.Option(min=0.1, help="So long, or at most so long for the steps.")] = 10.0,
    url: Annotated[str, typer.Option(help="The router's HTTP address.")] = "http://127.0.0.1:8000",
    api_key_file: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="An operator's key.")] = None,
    ca: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file of the authority.")] = None,
) -> None:
    """Record what a router or a worker does; for Perfetto or chrome://tracing, speedscope, or a browser."""
    if router == (worker is not None):
        raise typer.BadParameter("either --router or --worker NAME")
    if router and out.suffix not in _FORMATS:
        raise typer.BadParameter(f"{out.name}: name the file {', '.join(f'*{one}' for one in _FORMATS)}")
    asked: dict[str, str | float] = {"seconds": seconds}
    asked |= {"format": _FORMATS[out.suffix]} if worker is None else {"worker": worker, "steps": steps}
    path = "/debug/profile/router" if worker is None else "/debug/profile/worker"
    key = api_key_file.read_text(encoding="utf-8").strip() if api_key_file else None
    content, note = _fetch(url + path, asked, key, ca, timeout_s=seconds + _MARGIN_S)
    out.write_bytes(gzip.decompress(content) if worker is not None and out.suffix != ".gz" else content)
    print(f"{out}{note}")


def _fetch(
    url: str, asked: dict[str, str | float], key: str | None, ca: Path | None, *, timeout_s: float
) -> tuple[bytes, str]:
    """The file, and how many steps it has. Ends the command when there is none."""
    import httpx

    from cluster.client import client_tls

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    tls = client_tls(ca, None)
    try:
        with httpx.Client(timeout=timeout_s, trust_env=False, verify=True if tls is None else tls) as client:
            answer = client.post(url, params=asked, headers=headers)
    except httpx.HTTPError as error:
        typer.echo(f"error: {url}: {error}", err=True)
        raise typer.Exit(1) from None
    if answer.status_code != httpx.codes.OK:
        typer.echo(f"error: {answer.status_code}: {_message(answer.content)}", err=True)
        raise typer.Exit(1)
    steps = answer.headers.get("X-Tandem-Steps")
    return answer.content, f": {steps} steps" if steps else ""


def _message(content: bytes) -> str:
    import json

    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content[:200].decode("utf-8", "replace")
