"""The code of an earlier revision of this repository, as run beside today's."""

from pathlib import Path

import pytest
import yaml

from tests.previous.revision import DEFAULTS_INSIDE, unpack

pytestmark = pytest.mark.slow  # a checkout without its history would not do


def test_unpack_of_this_revision_contains_the_packages(tmp_path: Path) -> None:
    unpack("HEAD", tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        *("tandem", "engine", "kv_transfer", "router", "worker", "prefill_worker", "decode_worker")
    }
    assert yaml.safe_load((tmp_path / DEFAULTS_INSIDE).read_text())["router"]["port"] == 8000


def test_unpack_of_older_revision_keeps_its_packages(tmp_path: Path) -> None:
    unpack("7b16ddc95ef4f97bac5d1147afd38329659df570", tmp_path)
    assert (tmp_path / "fabric").is_dir()
    assert not (tmp_path / "worker").exists()
    assert yaml.safe_load((tmp_path / DEFAULTS_INSIDE).read_text())["router"]["port"] == 8000
