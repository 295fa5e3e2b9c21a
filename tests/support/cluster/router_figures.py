"""What routers tell, made by the router's own metrics, so that names and formats are theirs."""

from cluster.planner.router_figures import RouterFigures, read_figures
from cluster.planner.values import PlannerPolicy, Sizes
from router.metrics.router_metrics import RouterMetrics
from tandem.errors import Code

POLICY = PlannerPolicy(
    start_s=60.0,
    hold_s=60.0,
    flip_hold_s=30.0,
    cooldown_s=15.0,
    most_flips=1,
    most_workers=8,
    least=Sizes(prefill=1, decode=1),
)


class RouterCounters:
    """One router's life, as far as a planner sees it."""

    def __init__(self) -> None:
        self.metrics = RouterMetrics("m")

    def serve(self, num: int, *, prompt: int = 1000, output: int = 100, ttft_s: float = 0.2, cached: int = 0) -> None:
        for _ in range(num):
            self.metrics.prompt_size.observe(prompt)
            self.metrics.answer_size.observe(output)
            self.metrics.ttft.observe(ttft_s)
            self.metrics.prefix_queries.inc(prompt)
            self.metrics.prefix_hits.inc(cached)

    def lose(self, num: int, code: Code = Code.UNAVAILABLE) -> None:
        for _ in range(num):
            self.metrics.failed(code)

    def text(self, more: str = "") -> str:
        return self.metrics.render().decode() + more

    def figures(self, more: str = "") -> RouterFigures:
        return read_figures(self.text(more))


def backlog(**tokens: int) -> str:
    lines = [f'tandem_worker_backlog_tokens{{worker="{name}",role="prefill"}} {n}' for name, n in tokens.items()]
    return "\n".join(lines) + "\n"


def steps(worker: str, role: str, **counts: float) -> str:
    """`steps`, `seconds`, `tokens`, `requests`, as WorkMetrics shows them."""
    names = {"steps": "tandem_worker_steps_total"}
    lines = [
        f'{names.get(what, f"tandem_worker_step_{what}_total")}{{worker="{worker}",role="{role}",kind="{role}"}} {n}'
        for what, n in counts.items()
    ]
    return "\n".join(lines) + "\n"
