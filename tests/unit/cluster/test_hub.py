"""What a pod fetches before it starts, and that it does so once."""

from pathlib import Path
from typing import Any

import pytest

from cluster.hub import fetch
from tandem.errors import ConfigError


class Hub:
    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def __call__(self, hub_id: str, **options: Any) -> Path:
        self.asked.append({"id": hub_id} | options)
        return options["local_dir"]


def test_a_model_is_fetched_once_and_a_tokenizer_is_no_model(tmp_path: Path) -> None:
    hub, into = Hub(), tmp_path / "models" / "m"
    assert fetch("org/m", into, revision=None, weights=False, snapshot=hub)
    assert fetch("org/m", into, revision=None, weights=True, snapshot=hub)
    assert not fetch("org/m", into, revision=None, weights=True, snapshot=hub)
    assert not fetch("org/m", into, revision=None, weights=False, snapshot=hub)
    assert ["*.safetensors" in asked["allow_patterns"] for asked in hub.asked] == [False, True]
    assert fetch("org/m", into, revision="v2", weights=True, snapshot=hub)
    assert hub.asked[-1]["revision"] == "v2"


def test_what_failed_is_fetched_again(tmp_path: Path) -> None:
    def gone(_hub_id: str, **_options: Any) -> Path:
        raise OSError("no such repository")

    with pytest.raises(ConfigError, match="cannot fetch org/m: no such repository"):
        fetch("org/m", tmp_path, revision=None, weights=True, snapshot=gone)
    assert fetch("org/m", tmp_path, revision=None, weights=True, snapshot=Hub())
