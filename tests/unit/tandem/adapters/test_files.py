"""Adapters are identified by what their files hold, and refused by name where they cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.adapters.files import Adapter, check_adapter, checked_adapter_name, read_adapter
from tandem.errors import ConfigError, UnreadableFile
from tandem.protocol.wire import adapter_from_pb, adapter_to_pb


def write(path: Path, weights: bytes = b"weights", **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16} | config))
    (path / "adapter_model.safetensors").write_bytes(weights)
    return path


def test_read_adapter_names_its_files_by_their_content(tmp_path: Path) -> None:
    found = read_adapter("style:formal", write(tmp_path / "a"))
    assert (found.name, found.path, found.num_bytes, len(found.digest)) == ("style:formal", tmp_path / "a", 7, 64)
    assert read_adapter("other", write(tmp_path / "b")).digest == found.digest
    assert read_adapter("a", write(tmp_path / "a", b"Weights")).digest != found.digest
    assert read_adapter("a", write(tmp_path / "a", r=4)).digest != found.digest


@pytest.mark.parametrize("name", ["", "a b", "é", "a\n", "x" * 129])
def test_checked_adapter_name_wrong_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="an adapter's name must have"):
        checked_adapter_name(name)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_read_adapter_without_a_file_names_it(tmp_path: Path, missing: str) -> None:
    (write(tmp_path / "a") / missing).unlink()
    with pytest.raises(UnreadableFile, match=rf"{missing}: No such file"):
        read_adapter("a", tmp_path / "a")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("{", ".* is not valid JSON"),
        ("[]", ".* must be a JSON object"),
        ('{"peft_type": "IA3"}', ".* peft_type must be LORA, is 'IA3'"),
        ('{"peft_type": "LORA", "r": 8, "lora_alpha": 8, "use_dora": true}', ".* use_dora True is not supported"),
    ],
)
def test_read_adapter_of_another_kind_is_refused(tmp_path: Path, config: str, reason: str) -> None:
    (write(tmp_path / "a") / "adapter_config.json").write_text(config)
    with pytest.raises(ConfigError, match=rf"a/adapter_config.json:?{reason}"):
        read_adapter("a", tmp_path / "a")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"r": 65}, "r is 65, and engine.max_adapter_rank 64"),
        ({"r": 8, "rank_pattern": {"q_proj": 128}}, "rank_pattern.q_proj is 128, and engine.max_adapter_rank 64"),
        ({"r": True}, "r must be an integer of 1 to 65536, is True"),
        ({"r": 8, "rank_pattern": ["q_proj"]}, "rank_pattern must be an object"),
    ],
)
def test_check_adapter_wrong_rank_names_the_field(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"adapter_config.json: {reason}"):
        check_adapter(write(tmp_path / "a", **config), max_rank=64)
    check_adapter(write(tmp_path / "a", r=64), max_rank=64)


def test_check_adapter_bounds_the_matrices_without_their_names(tmp_path: Path) -> None:
    path = write(tmp_path / "a", (1000).to_bytes(8, "little") + bytes(1000) + bytes(64))
    check_adapter(path, max_rank=64, max_bytes=64)
    with pytest.raises(ConfigError, match=r"has matrices of 64 bytes, engine.adapter_bytes admits 63"):
        check_adapter(path, max_rank=64, max_bytes=63)


def test_adapter_round_trips() -> None:
    adapter = Adapter(name="a", path=Path("/x/a"), digest="0" * 64, num_bytes=5 << 30)
    assert adapter_from_pb(adapter_to_pb(adapter)) == adapter
