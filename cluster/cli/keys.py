"""`tandem key`: keys for clients, and what the configuration keeps of them."""

import sys

from pydantic import ValidationError

from tandem.config.admission import ApiKey
from tandem.errors import ConfigError
from tandem.values.api_key import entry_of, new_key


def show_new(tenant: str | None, operator: bool = False) -> int:
    """Print a new key and its entry; returns the exit code."""
    key = new_key()
    entry = _entry(key, tenant, operator)
    print(f"key (for its user; it is shown this once): {key}")
    print(f"entry (for router.api_keys, or the file of keys): {entry}")
    return 0


def show_digest(tenant: str | None, operator: bool = False) -> int:
    """The entry of a key from standard input: on a command line it would stay in histories."""
    print(_entry(sys.stdin.readline().strip(), tenant, operator))
    return 0


def _entry(key: str, tenant: str | None, operator: bool) -> str:
    """In YAML. Raises ConfigError for what can be no key, or no tenant."""
    try:
        ApiKey.model_validate({"key": key, "tenant": tenant})
    except ValidationError as error:
        wrong = error.errors(include_input=False)[0]
        where = ".".join(map(str, wrong["loc"]))
        raise ConfigError(f"{where}: {wrong['msg'].removeprefix('Value error, ')}") from None
    digest = entry_of(key)
    rest = ["" if tenant is None else f", tenant: {tenant}", ", operator: true" if operator else ""]
    return f'{{key: "{digest}"{"".join(rest)}}}' if any(rest) else f'"{digest}"'
