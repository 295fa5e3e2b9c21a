"""Simulated clusters that are short of one pool, looked at while many wait at the router's gate."""

from collections.abc import Callable
from typing import Literal

from cluster.simulator.model.simulation import Choosing, Simulation
from router.admission.cluster_capacity import Shortage
from router.metrics.admission import AdmissionMetrics
from router.metrics.router_metrics import RouterMetrics
from tests.support.cluster.small_clusters import cluster, load

Bottleneck = Literal["prefill", "decode"]
QUEUE = 40
MODEL = "m"


def run_until_queue(bottleneck: Bottleneck, look: Callable[[Simulation], None]) -> Simulation:
    """Call `look(simulation)` once, as soon as QUEUE requests wait; the simulation is then run to its end.

    Short of prefill: long prompts with short answers before one prefill worker and four that decode. Short of decode:
    short prompts with long answers before four prefill workers and one that decodes eight at a time.
    """
    if bottleneck == "prefill":
        spec, lengths = cluster(1, 4, num_blocks=8000), {"prompt": 3000.0, "output": 8.0}
    else:
        spec, lengths = cluster(4, 1, num_blocks=2000, rows=8), {"prompt": 300.0, "output": 200.0}
    simulation = Simulation(spec, load(100, rate=100.0, **lengths), Choosing(), seed=1)
    looked = False

    def watch() -> None:
        nonlocal looked
        if not looked and simulation.router.admission.fair.num_waiting >= QUEUE:
            looked = True
            look(simulation)
        elif not looked:
            simulation.events.in_background(0.05, watch)

    simulation.events.in_background(0.05, watch)
    simulation.run()
    assert looked
    return simulation


def held(simulation: Simulation) -> dict[Shortage, int]:
    """Requests in line by what they wait for."""
    found = simulation.router.admission.fair.held()
    return {lack: sums.num_requests for lack, sums in found.items() if sums.num_requests}


def exposition(simulation: Simulation) -> str:
    """What a router would show to Prometheus at this moment."""
    metrics = RouterMetrics(MODEL)
    metrics.registry.register(AdmissionMetrics(simulation.router.admission.fair, metrics.tenants))
    metrics.worker_loads(simulation.registry.snapshots())
    return metrics.render().decode()
