"""The command-line interface of `tandem doctor`."""

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The cluster's YAML.", rich_help_panel="Configuration")
    ] = None,
    router_only: Annotated[
        bool, typer.Option("--router", help="Check only what a machine with routers and no workers needs.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check whether this machine can run Tandem, and what is wrong; exit code 1 if it cannot."""
    from rich.console import Console

    from cluster.doctor import checks
    from cluster.doctor.findings import as_json, has_failed, print_findings
    from tandem.config.cluster import load

    findings = checks.examine(load(config), router_only=router_only)
    if json_:
        print(as_json(findings))
    else:
        print_findings(Console(highlight=False), findings)
    raise typer.Exit(1 if has_failed(findings) else 0)
