"""Every setting, and every choice of a setting that has a few, is in a row of the table or names where it is tested."""

import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from tandem.config.cluster import ClusterConfig, load
from tests.e2e.settings.table import ELSEWHERE, ROWS, WITHOUT_A_CLUSTER
from tests.suite.run import ROOT

_NAMES = {
    "folder": "/folder",
    "port": 4317,
    "prefill_health": 9001,
    "decode_health": 9002,
    "redis": "rediss://127.0.0.1",
    "pem": "text",
}
_BASE = {"router.port": 0, "router.grpc_port": 0}


def settings_of(model: type[BaseModel], path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Dotted names of all settings, without the names in mappings and lists; and their types."""
    for name, field in model.model_fields.items():
        below = list(_models(field.annotation))
        for one in below:
            yield from settings_of(one, (*path, name))
        if not below:
            yield ".".join((*path, name)), field.annotation


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from _models(inner)


def changed(value: BaseModel, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Settings whose value is not their default, and that value."""
    for name, field in type(value).model_fields.items():
        own = getattr(value, name)
        dotted = (*path, name)
        if isinstance(own, BaseModel):
            yield from changed(own, dotted)
        elif isinstance(own, Mapping) and own and all(isinstance(one, BaseModel) for one in own.values()):
            for one in own.values():
                yield from changed(one, dotted)
        elif isinstance(own, Sequence) and own and all(isinstance(one, BaseModel) for one in own):
            for one in own:
                yield from changed(one, dotted)
        elif field.is_required() or own != field.get_default(call_default_factory=True):
            yield ".".join(dotted), own


def choices(annotation: Any) -> set[Any]:
    """The values of a setting that has a few."""
    if typing.get_origin(annotation) is typing.Literal:
        return set(typing.get_args(annotation))
    return {choice for inner in typing.get_args(annotation) for choice in choices(inner)}


def rows_settings() -> dict[str, set[str]]:
    """What the rows change, and to which values, as texts."""
    found: dict[str, set[str]] = {}
    for row in ROWS.values():
        for name, value in changed(load(None, {**_BASE, **row.named(_NAMES)})):
            found.setdefault(name, set()).add(str(value))
    return found


def test_every_setting_is_in_a_row_or_names_its_test() -> None:
    tested = rows_settings()
    missing = []
    for name, annotation in settings_of(ClusterConfig):
        if name in ELSEWHERE or name in WITHOUT_A_CLUSTER:
            continue
        if name not in tested and not choices(annotation):
            missing.append(name)
        default = str(_default(name))
        missing += [
            f"{name}={choice}"
            for choice in sorted(map(str, choices(annotation)))
            if choice != default and choice not in tested.get(name, ()) and f"{name}={choice}" not in ELSEWHERE
        ]
    assert missing == []


def _default(name: str) -> Any:
    """None for settings of a section that is absent, whose defaults a row must not have to state."""
    model: type[BaseModel] = ClusterConfig
    *sections, last = name.split(".")
    for section in sections:
        model = next(_models(model.model_fields[section].annotation))
    field = model.model_fields[last]
    return None if field.is_required() else field.get_default(call_default_factory=True)


def test_settings_tested_elsewhere_are_named_there() -> None:
    known = {name for name, _ in settings_of(ClusterConfig)}
    wrong = []
    for key, path in (ELSEWHERE | WITHOUT_A_CLUSTER).items():
        name, _, choice = key.partition("=")
        text = (ROOT / path).read_text(encoding="utf-8")
        word = choice or name.rpartition(".")[2]
        # In capitals where it is set by a variable.
        if name not in known or not re.search(rf"(?i)(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", text):
            wrong.append(key)
    assert wrong == []


def test_no_setting_is_listed_elsewhere_that_a_row_has() -> None:
    tested = rows_settings()
    listed = (key.partition("=") for key in ELSEWHERE)
    assert [name for name, _, choice in listed if (choice in tested.get(name, ()) if choice else name in tested)] == []
