"""A small run of `tandem bench scale`: workers crash, come and leave by the dozen, and no stream hangs or differs."""

import io

import pytest
from rich.console import Console

from tandem_bench.__main__ import parser
from tandem_bench.scale.measure import measure

SMALL = {"workers": 60, "storm": 20, "streams": 240, "tokens": 12, "seconds": 5}


@pytest.mark.slow
async def test_storms_of_workers_leave_no_stream_hanging_and_none_different() -> None:
    arguments = [part for name, value in SMALL.items() for part in (f"--{name}", str(value))]
    rows, out = [], Console(file=io.StringIO(), width=120)
    await measure(parser().parse_args(["scale", *arguments]), rows, out=out, err=out)
    print(out.file.getvalue())
    found = {row.name: row for row in rows}
    assert found["sessions of workers with routers"].value == 2 * SMALL["workers"]
    assert found["streams ended with exactly their text"].value >= SMALL["streams"]
    assert found["streams that ended and said why"].value <= 0.02 * found["streams ended with exactly their text"].value
    assert [f"{row.name}: {row.value:.3g} {row.unit}, {row.goal}" for row in rows if row.met is False] == []
