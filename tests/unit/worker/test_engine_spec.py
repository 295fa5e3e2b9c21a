"""The specification of a worker's engine, from the cluster's configuration."""

import pytest
from pydantic import ValidationError

from engine.types.config import SpeculationConfig
from tandem.config.cluster import load
from tandem.errors import ConfigError
from tandem.values.roles import WorkerRole
from tandem.values.step_sizes import DRAFT_SOURCES
from worker.engine_spec import engine_spec

SECRET = {"secret": "0123456789abcdef"}


def test_engine_spec_speculation_is_off_unless_it_has_sources() -> None:
    assert engine_spec(load(None, SECRET), WorkerRole.DECODE).speculation is None


def test_engine_spec_speculation_is_for_workers_that_decode() -> None:
    settings = {"engine.speculation.sources": list(DRAFT_SOURCES), "engine.speculation.max_draft_tokens": 5}
    config = load(None, SECRET | settings)
    expected = SpeculationConfig(sources=DRAFT_SOURCES, max_draft_tokens=5, adaptive=True)
    assert engine_spec(config, WorkerRole.DECODE).speculation == expected
    assert engine_spec(config, WorkerRole.PREFILL).speculation is None


@pytest.mark.parametrize(
    ("name", "value"), [("sources", ["magic"]), ("max_draft_tokens", 0), ("max_draft_tokens", 65), ("depth", 3)]
)
def test_engine_spec_bad_speculation_is_refused(name: str, value: object) -> None:
    with pytest.raises((ConfigError, ValidationError), match=f"engine.speculation.*{name}"):
        load(None, SECRET | {f"engine.speculation.{name}": value})
