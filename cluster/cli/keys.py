"""`tandem key`: generates API keys, and the entries that the configuration holds for them."""

import sys

from pydantic import ValidationError

from tandem.config.admission import ApiKey
from tandem.errors import ConfigError
from tandem.values.api_key import entry_of, new_key


def show_new(tenant: str | None, operator: bool = False) -> int:
    """Print a new key and its entry, and return the exit code."""
    key = new_key()
    entry = _entry(key, tenant, operator)
    print(f"key (give it to its user; it is shown only once): {key}")
    print(f"entry (for router.api_keys, or the key file): {entry}")
    return 0


def show_digest(tenant: str | None, operator: bool = False) -> int:
    """Print the entry for a key read from standard input, as a command line would stay in the shell's history."""
    print(_entry(sys.stdin.readline().strip(), tenant, operator))
    return 0


def _entry(key: str, tenant: str | None, operator: bool) -> str:
    """Render the entry as YAML. Raises ConfigError for an invalid key or tenant."""
    try:
        ApiKey.model_validate({"key": key, "tenant": tenant})
    except ValidationError as error:
        wrong = error.errors(include_input=False)[0]
        where = ".".join(map(str, wrong["loc"]))
        raise ConfigError(f"{where}: {wrong['msg'].removeprefix('Value error, ')}") from None
    digest = entry_of(key)
    rest = ["" if tenant is None else f", tenant: {tenant}", ", operator: true" if operator else ""]
    return f'{{key: "{digest}"{"".join(rest)}}}' if any(rest) else f'"{digest}"'
