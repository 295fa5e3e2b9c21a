"""`tandem key`: generates API keys, and the entries that the configuration holds for them."""

import sys
from typing import Annotated

import typer

from tandem.errors import ConfigError


def key(
    action: Annotated[
        str,
        typer.Argument(
            metavar="new|digest", help="Generate a key, or print the entry for one read from standard input."
        ),
    ] = "new",
    tenant: Annotated[str | None, typer.Option(help="Tenant to put into the entry.")] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="Operator key: may see all tenants and /metrics, and may profile.")
    ] = False,
) -> None:
    """Generate an API key: the key goes to its user, the entry into [b]router.api_keys[/b] or the key file."""
    from tandem.values.api_key import new_key

    if action == "digest":
        # Read from there, as a command line would stay in the shell's history.
        print(_entry(sys.stdin.readline().strip(), tenant, operator))
    elif action == "new":
        made = new_key()
        entry = _entry(made, tenant, operator)
        print(f"key (give it to its user; it is shown only once): {made}")
        print(f"entry (for router.api_keys, or the key file): {entry}")
    else:
        raise ConfigError("expected `tandem key new` or `tandem key digest`")


def _entry(key: str, tenant: str | None, operator: bool) -> str:
    """Render the entry as YAML. Raises ConfigError for an invalid key or tenant."""
    from pydantic import ValidationError

    from tandem.config.admission import ApiKey
    from tandem.values.api_key import entry_of

    try:
        ApiKey.model_validate({"key": key, "tenant": tenant})
    except ValidationError as error:
        wrong = error.errors(include_input=False)[0]
        where = ".".join(map(str, wrong["loc"]))
        raise ConfigError(f"{where}: {wrong['msg'].removeprefix('Value error, ')}") from None
    digest = entry_of(key)
    rest = ["" if tenant is None else f", tenant: {tenant}", ", operator: true" if operator else ""]
    return f'{{key: "{digest}"{"".join(rest)}}}' if any(rest) else f'"{digest}"'
