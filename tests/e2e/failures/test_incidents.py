"""Each walk-through's incident, on a real cluster with a real Prometheus, raises its alarms and no others."""

import asyncio

import pytest

from tandem_bench.incidents.known import INCIDENTS
from tandem_bench.incidents.reproduce import reproduced

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", list(INCIDENTS))
def test_incident_raises_its_alerts_until_cured(name: str) -> None:
    async def shown() -> tuple[bool, object]:
        async with reproduced(INCIDENTS[name](), 40.0) as report:
            return report.is_shown, report.held

    is_shown, held = asyncio.run(shown())
    assert is_shown, held
