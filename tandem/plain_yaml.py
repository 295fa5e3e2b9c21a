"""YAML as configuration files may use it."""

from typing import Any

import yaml

from tandem.errors import ConfigError


class PlainLoader(yaml.SafeLoader):
    """Safe YAML without aliases (a few lines of them can expand to gigabytes) and without duplicate keys."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """See PyYAML; refuses an alias."""
        if self.check_event(yaml.events.AliasEvent):
            raise ConfigError("YAML aliases are not allowed")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """See PyYAML; refuses a key that stands twice."""
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(f"a key is a list or a mapping (line {key.start_mark.line + 1})")
            if key.value in keys:
                raise ConfigError(f"key {key.value!r} stands twice (line {key.start_mark.line + 1})")
            keys.add(key.value)
        return super().construct_mapping(node, deep=deep)
