"""Reads YAML files of settings: plain values only, bounded, without duplicate keys."""

from pathlib import Path
from typing import Any

import yaml

from tandem.config.source.regular_file import Check, read_regular_text
from tandem.errors import ConfigError


class PlainLoader(yaml.SafeLoader):
    """Safe YAML without aliases (a few lines of them can expand to gigabytes) and without duplicate keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node. Raises ConfigError for an alias: small files could expand without bound."""
        if self.check_event(yaml.events.AliasEvent):
            raise ConfigError("YAML aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a mapping. Raises ConfigError for a duplicate key, or one that is not a scalar."""
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"a key is a list or a mapping (line {key.start_mark.line + 1})")
            if key.value in keys:
                raise ConfigError(f"duplicate key {key.value!r} (line {key.start_mark.line + 1})")
            keys.add(key.value)
        return super().construct_mapping(node, deep=deep)


def read_mapping(path: Path, check: Check | None = None) -> dict[str, Any]:
    """Read a file's sections; {} if it is empty. `check`: see `read_regular_file`.

    Raises ConfigError that begins with the path, UnreadableFile when the file cannot be read, and whatever `check`
    raises.
    """
    text = read_regular_text(path, check=check)
    try:
        # A SafeLoader subclass: it builds plain values only.
        data = yaml.load(text, Loader=PlainLoader)  # noqa: S506
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{path}: {_position_and_problem(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    except (ValueError, LookupError, AttributeError) as error:
        # For example text that looks like a date but is none. The error's own text may quote a secret.
        raise ConfigError(f"{path}: a value cannot be read ({type(error).__name__}); put it in quotes") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    return data


def _position_and_problem(error: yaml.MarkedYAMLError) -> str:
    """The position and problem in one line; the parser's own message has six, which quote the file."""
    why = ", ".join(part for part in (error.context, error.problem) if part)
    mark = error.problem_mark or error.context_mark
    return why if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {why}"
