"""Rendering of a plan as text: the load and the objectives, one line per design, and the answer."""

from collections.abc import Callable, Sequence

from cluster.simulator.inputs.trace import Trace
from cluster.simulator.model.report import HELD_SHARE, Slo
from cluster.simulator.studies.plan import Plan, ratio

_LEGEND = (
    "workers: 1:2 is one prefill and two decode workers; a single number is workers that do both (colocated).",
    "design: tp2 is a worker of two GPUs; batch is the maximum sequences per step. TTFT: time to the first token; ITL: "
    "time between two tokens.",
)


def plan_table(plans: Sequence[Plan], trace: Trace, slo: Slo) -> str:
    width = max(len(plan.design.name) for plan in plans)
    header = f"{'workers':>7}  {'GPUs':>4}  {'p99 TTFT':>10}  {'p99 ITL':>9}  {'design'.ljust(width)}  why so many"
    return "\n".join(
        [*_question(trace, slo), "", header, *(_line(p, width) for p in plans), "", *_LEGEND, "", _answer(plans)]
    )


def _question(trace: Trace, slo: Slo) -> list[str]:
    count, span_s = len(trace.requests), max(1e-9, trace.span_s)
    prompt, answer = trace.num_prompt_tokens / max(1, count), trace.num_output_tokens / max(1, count)
    return [
        f"load: {count} requests, {count / span_s:.3g} per second, on average "
        f"{prompt:.0f} prompt tokens and {answer:.0f} answer tokens",
        f"objectives: {HELD_SHARE:.0%} of first tokens within {slo.ttft_s:g} s, {HELD_SHARE:.0%} of the others within "
        f"{slo.itl_s:g} s of the one before, and no request fails",
    ]


def _line(plan: Plan, width: int) -> str:
    name = plan.design.name.ljust(width)
    if plan.report is None:
        return f"{'-':>7}  {'-':>4}  {'-':>10}  {'-':>9}  {name}  {'; '.join(plan.why)}"
    times = f"{plan.report.ttft_ms.p99:7.0f} ms  {plan.report.itl_ms.p99:6.1f} ms"
    return f"{ratio(plan.sizes):>7}  {plan.gpus:>4}  {times}  {name}  {_why(plan)}"


def _why(plan: Plan) -> str:
    return "; ".join(plan.why) or "no smaller size is possible"


def _answer(plans: Sequence[Plan]) -> str:
    best = plans[0]
    if best.report is None:
        return "no design meets the objectives within the GPUs allowed (--max-gpus)"

    def cheapest(wanted: Callable[[Plan], bool]) -> Plan | None:
        return next((p for p in plans if p.report is not None and wanted(p)), None)

    is_colocated = best.design.prefill is None
    other = cheapest(lambda p: (p.design.prefill is None) != is_colocated)
    word = "with separate pools" if is_colocated else "of workers that do both"
    against = (
        f"nothing {word} meets the objectives within the GPUs allowed (--max-gpus)"
        if other is None
        else f"the cheapest {word} ({other.design.name}, {ratio(other.sizes)}) needs {_gpus(other)}"
    )
    return f"cheapest: {ratio(best.sizes)} of {best.design.name}, {_gpus(best)} ({_why(best)}); {against}"


def _gpus(plan: Plan) -> str:
    return f"{plan.gpus} GPU" if plan.gpus == 1 else f"{plan.gpus} GPUs"
