"""One engine for all of these tests; they are skipped, with a reason, where there can be none."""

import re
from collections.abc import Iterator

import pytest

from tests.containers.engine import Engine, why_not
from tests.containers.images import Images, build_images
from tests.images.context import ROOT


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Engine() as made:
        yield made


@pytest.fixture(scope="session")
def images(engine: Engine) -> Images:
    found = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return build_images(engine, found[1])
