"""All of `python -m tandem_bench adapters`: what LoRA adapters cost a step, and where requests for them land."""

import argparse

from rich.console import Console

from tandem_bench.adapters.landing import measure_landing
from tandem_bench.adapters.options import PARTS
from tandem_bench.adapters.steps import measure_steps
from tandem_bench.make_model import cached_model
from tandem_bench.report import Row, print_table
from tandem_bench.shapes import REFERENCE, SHAPES


async def measure(options: argparse.Namespace, rows: list[Row], *, out: Console, err: Console) -> None:
    """Add the figures to `rows`. Raises CannotMeasure."""
    parts = options.only or PARTS
    try:
        if "steps" in parts:
            dtype = "bfloat16"
            model = options.model or str(cached_model(SHAPES[REFERENCE], dtype))
            rows += measure_steps(model, dtype, num_threads=options.threads, rounds=options.rounds, err=err)
        if "landing" in parts:
            rows += await measure_landing(
                "builtin",
                num_adapters=options.adapters,
                resident=options.resident,
                num_requests=options.requests,
                seed=options.seed,
                err=err,
            )
    finally:
        print_table(out, rows)
