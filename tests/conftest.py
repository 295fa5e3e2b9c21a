"""Which tests share the processors with others and which have them to themselves; which component each belongs to."""

import atexit
import gc
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.suite import rotation

_TESTS = Path(__file__).parent
_ONE_PROCESS = ("memory_budget", "storms", "determinism")
_SHARED = (
    *(_TESTS / folder for folder in ("unit", "chart", "proofs/faults", "integration/handoff")),
    *(_TESTS / f"integration/engine/test_{name}.py" for name in _ONE_PROCESS),
)
"""Of one process, or of few that wait for each other."""
_COMPUTE = (
    *(_TESTS / f"unit/engine/{name}" for name in ("backends", "kernels", "model", "runner", "sampling", "scheduler")),
    *(_TESTS / f"unit/engine/{name}" for name in ("kv_cache", "speculation", "test_speculation.py", "types")),
    *(_TESTS / f"unit/router/{name}" for name in ("admission", "http/openapi", "metrics", "placement", "text")),
    *(_TESTS / f"unit/cluster/{name}" for name in ("chart", "planner", "simulator")),
    *(_TESTS / f"unit/kv_transfer/{name}" for name in ("layout", "protocol")),
    *(_TESTS / f"unit/tandem/{name}" for name in ("config", "gguf")),
    *(_TESTS / f"unit/{name}" for name in ("docs", "monitoring", "test_house_rules.py")),
    *(_TESTS / f"chart/test_{name}.py" for name in ("rendered", "refused")),
    *(_TESTS / f"integration/engine/test_{name}.py" for name in ("storms", "determinism")),
)
"""Of those, tests that compute and wait for nothing: they run at the lowest priority, beside those of clusters."""

COMPONENTS = {
    "tandem": "tandem",
    "engine": "engine",
    "worker": "worker",
    "prefill_worker": "worker",
    "decode_worker": "worker",
    "kv_transfer": "kv",
    "router": "router",
    "cluster": "cluster",
    "tandem_bench": "bench",
}
"""Markers by folder of tests/unit: `make test-router` runs what is marked `router`."""

settings.register_profile("untimed", settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("untimed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether nothing in a file or folder can be chosen, as `make test` chooses twice and `make test-router` one
    component: to import all takes a while."""
    chosen = config.getoption("markexpr")
    component = chosen.partition(" and ")[0] if " or " not in chosen else ""
    if collection_path.parent == _TESTS / "unit" and component in COMPONENTS.values():
        return COMPONENTS.get(collection_path.name) != component or None
    if collection_path.suffix != ".py" or "alone" not in chosen:
        return None
    if not _is_shared(collection_path):
        return "not alone" in chosen or None
    if "compute" in chosen:
        return ("not compute" in chosen) == _is_compute(collection_path) or None
    return ("not alone" not in chosen and "mark.alone" not in collection_path.read_text(encoding="utf-8")) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leave the modules that tests import out of every later search for cycles: they stay, and are most of what there
    is (torch, transformers), so that looking through them took a sixth of the processor's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        # Extension modules that are to free all they made look for it at the end.
        atexit.register(gc.unfreeze)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark, before any is chosen by its marks: what starts a cluster as alone, what has another turn today as slow."""
    rotation.leave_to_nightly(items)
    for item in items:
        if not _is_shared(item.path):
            item.add_marker(pytest.mark.alone)
        elif _is_compute(item.path):
            item.add_marker(pytest.mark.compute)
        folder = item.path.relative_to(_TESTS).parts
        if folder[0] == "unit" and folder[1] in COMPONENTS:
            item.add_marker(COMPONENTS[folder[1]])


def _is_shared(path: Path) -> bool:
    return any(map(path.is_relative_to, _SHARED))


def _is_compute(path: Path) -> bool:
    return any(map(path.is_relative_to, _COMPUTE))


@pytest.fixture
def default_sighup() -> Iterator[None]:
    """SIGHUP has its default meaning for processes that the test starts, even below `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
