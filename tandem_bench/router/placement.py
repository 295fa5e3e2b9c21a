"""Cost of one placement by the number of workers: the choice itself, and everything around it.

`choice` is the pure `place` over the columns: prefill and decode worker together. `whole` is everything that `Placer`
does for a prompt of 256 blocks (4,096 tokens), half of them cached somewhere, with one load report: the prefix map, the
choice, a worker to fetch from, the ledger, and what will be cached where, which is then dropped to keep the map
constant. `report` is processing one worker's load report.
"""

import itertools
from random import Random

import numpy as np

from router.placement.costs import CostModel
from router.placement.demand import PlacementDemand
from router.placement.placer import Placer
from router.placement.worker_selection import place
from tandem_bench.report import Row, figure
from tandem_bench.router import workers
from tandem_bench.router.timing import least_us

NUM_EACH = (4, 8, 32, 64, 500, 1000)
"""Number of workers in each of the two pools."""
GOALS_US = {8: 60.0, 500: 150.0}
"""Goals of the choice, by workers in each pool."""
_CALLS = 50
_TOKENS = 4_096


def rows(repeats: int) -> list[Row]:
    found: list[Row] = []
    for num_each in NUM_EACH:
        label = f"placement.{num_each}+{num_each}"
        found.append(figure(f"{label}.choice", _choice_us(num_each, repeats), "us", at_most=GOALS_US.get(num_each)))
        found.append(figure(f"{label}.whole", _whole_us(num_each, repeats), "us"))
    found.append(figure("placement.report", _report_us(repeats), "us"))
    return found


def _choice_us(num_each: int, repeats: int) -> float:
    """Measure the choice with a third of the workers holding part of the prompt, so that no choices are equal."""
    rng = Random(1)
    view = workers.registry(rng, num_each=num_each).view()
    holds = [0, 0, 0, 0, 512, 1024]
    demands = [
        PlacementDemand(num_tokens=_TOKENS, matched=np.array(rng.choices(holds, k=view.num_slots)))
        for _ in range(_CALLS)
    ]
    model, ties = CostModel(), Random(2)

    def choose() -> None:
        for demand in demands:
            place(demand, view, model, ties)

    return least_us(choose, repeats=repeats, calls=_CALLS)


def _whole_us(num_each: int, repeats: int) -> float:
    """Measure prompts with equal beginnings and different ends, each assigned and, after a report, released."""
    rng = Random(3)
    registry = workers.registry(rng, num_each=num_each)
    shared, infos = workers.names(rng, 128), list(workers.infos(num_each))
    for one in infos[:: max(1, num_each // 4)]:
        registry.prefix_changed(one.key, workers.stored(shared))
    placer = Placer(registry=registry, model=CostModel(), rng=Random(4), clock=lambda: 0.0)
    prompts = [[*shared, *workers.names(rng, 128)] for _ in range(_CALLS)]
    reports = itertools.cycle([(one.key, workers.load(rng)) for one in infos])

    def serve() -> None:
        for prompt in prompts:
            assignment = placer.assign(num_tokens=_TOKENS + 1, names=prompt)
            registry.load_changed(*next(reports))
            placer.prompt_computed(assignment)
            placer.release(assignment)
            registry.prefix_map.revoke(assignment.placement.computing.info.key.worker_id, prompt)

    return least_us(serve, repeats=max(3, repeats // 3), calls=_CALLS)


def _report_us(repeats: int) -> float:
    rng = Random(5)
    registry = workers.registry(rng, num_each=64)
    registry.view()
    reports = [(one.key, workers.load(rng)) for one in workers.infos(64)]

    def take() -> None:
        for key, load in reports:
            registry.load_changed(key, load)

    return least_us(take, repeats=repeats, calls=len(reports))
