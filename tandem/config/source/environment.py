"""Settings from the environment: `TANDEM_ROUTER__PORT=9000` is `router.port`.

`TANDEM_SECRET__FILE=/run/secrets/one` sets `secret` to the text of that file, without surrounding white space: for
secrets that containers get as files, and that a process list should not show.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tandem.config.source.regular_file import read_regular_text
from tandem.errors import ConfigError

ENV_PREFIX = "TANDEM_"
_FROM_FILE = "file"


def put_variables(data: dict[str, Any], variables: Mapping[str, str]) -> None:
    """Apply the variables. Raises ConfigError that names an invalid one."""
    for name, value in sorted(variables.items()):
        if not name.startswith(ENV_PREFIX):
            continue
        keys = name.removeprefix(ENV_PREFIX).lower().split("__")
        if len(keys) > 1 and keys[-1] == _FROM_FILE:
            set_value(data, keys[:-1], _text_of(name, value))
        else:
            set_value(data, keys, _parsed(name, value))


def set_value(data: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set one value by its path; sections that are missing or null are created. Raises ConfigError."""
    for key in keys[:-1]:
        if data.get(key) is None:
            data[key] = {}
        data = data[key]
        if not isinstance(data, dict):
            raise ConfigError(f"{'.'.join(keys)}: {key} is not a section")
    data[keys[-1]] = value


def _parsed(name: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"environment variable {name}: not YAML") from None


def _text_of(name: str, path: str) -> str:
    try:
        return read_regular_text(Path(path)).strip()
    except ConfigError as error:
        raise ConfigError(f"environment variable {name}: {error}") from None
