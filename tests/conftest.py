"""Which tests share the processors with others, and which have them to themselves."""

from pathlib import Path

import pytest
from hypothesis import settings

_TESTS = Path(__file__).parent
_INTEGRATION = ("memory_budget", "storms", "determinism")
_SHARED = (
    *(_TESTS / folder for folder in ("unit", "chart", "faults")),
    *(_TESTS / f"integration/test_{name}.py" for name in _INTEGRATION),
    *(_TESTS / "integration").glob("test_handoff*.py"),
)
"""Of one process, or of few that wait for each other."""

settings.register_profile("untimed", settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before any is chosen by its marks: whatever starts a cluster is alone, and of the rest what says so."""
    for item in items:
        if not any(map(item.path.is_relative_to, _SHARED)):
            item.add_marker(pytest.mark.alone)
