"""A few minutes of `tandem bench soak`: no process of a whole cluster grows, and no request of its load fails."""

import io

import pytest
from rich.console import Console

from tandem_bench.__main__ import parser
from tandem_bench.soak.measure import measure


@pytest.mark.slow
async def test_soak_shows_no_growth_and_no_failure() -> None:
    options = parser().parse_args(["soak", "--minutes", "11", "--kill-every", "60"])
    rows, out = [], Console(file=io.StringIO(), width=120)
    await measure(options, rows, out=out, err=out)
    print(out.file.getvalue())
    found = {row.name: row for row in rows}
    judged = {name.partition(":")[0] for name, row in found.items() if name.endswith("growth of own memory")}
    assert {"tandem up", "router 0", "prefill_worker 0", "decode_worker 0"} <= judged
    assert found["workers killed"].value >= 6
    assert len([name for name in found if name.startswith("served: ")]) == 8, "every kind of request was served"
    assert [f"{row.name}: {row.value:.3g} {row.unit}, {row.goal}" for row in rows if row.met is False] == []
