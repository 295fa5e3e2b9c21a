"""The clusters of one run: started at once through the command line, used step by step, stopped at once."""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack

from tandem_bench.client import Client
from tandem_bench.clusters import RunningCluster, Setup, last_words, running
from tandem_bench.errors import ClusterFailed
from tandem_bench.gpu.stage import Note, Stage
from tandem_bench.report import Row, figure

_STOP_S = 12.0
"""Time left for stopping the clusters: whoever kills this process would leave them running."""
_START_SHARE = 0.7
"""Share of the time that the clusters may take to start, which on a GPU includes compiling its kernels."""
_STEP_S = 60.0
"""Time for one step with a cluster, so that one that hangs leaves the others theirs."""
_COMPLAINT = re.compile(r"WARNING|ERROR|CRITICAL|Traceback")
_MAX_COMPLAINTS, _LINE_CHARS = 12, 240
Found = list[Row | Note]
Step = Callable[[RunningCluster, Client], Awaitable[Found]]


class Fleet:
    """The clusters, by name."""

    def __init__(self, stage: Stage) -> None:
        self.clusters: dict[str, RunningCluster] = {}
        self.failures: list[str] = []
        """Why clusters did not start, each with the end of its log."""
        self._stage = stage
        self._stacks: list[AsyncExitStack] = []

    async def start(self, setups: Mapping[str, Setup]) -> Found:
        """Start all at once; those that fail are `failures`, the others are kept."""
        self._stacks = [AsyncExitStack() for _ in setups]
        starts = [
            stack.enter_async_context(running(setup, patience_s=_START_SHARE * self.left_s))
            for stack, setup in zip(self._stacks, setups.values(), strict=True)
        ]
        outcomes = dict(zip(setups, await asyncio.gather(*starts, return_exceptions=True), strict=True))
        self.clusters = {name: one for name, one in outcomes.items() if isinstance(one, RunningCluster)}
        self.failures = [f"{name}: {one}" for name, one in outcomes.items() if isinstance(one, BaseException)]
        return [figure(f"cluster.{name}.ready after", one.ready_s, "s") for name, one in self.clusters.items()]

    async def use(self, name: str, step: Step) -> Found:
        """Take one step. Raises ClusterFailed, with the end of the cluster's log, for whatever goes wrong."""
        cluster = self.clusters[name]
        try:
            async with asyncio.timeout(min(_STEP_S, self.left_s)), Client(cluster.url) as client:
                found = await step(cluster, client)
        except Exception as problem:
            raise ClusterFailed(f"{name}: {problem!r:.2000}\n{last_words(cluster.log)}") from problem
        if any(row.met is False for row in found if isinstance(row, Row)):
            found.append(Note(name=f"cluster.{name}.log", text=last_words(cluster.log)))
        return found

    def complaints(self) -> Iterator[Note]:
        """Tell which warnings and errors the clusters have logged; those about killed workers are due."""
        for name, cluster in self.clusters.items():
            lines = cluster.log.read_text(encoding="utf-8", errors="replace").splitlines()
            if found := [line[:_LINE_CHARS] for line in lines if _COMPLAINT.search(line)][:_MAX_COMPLAINTS]:
                yield Note(name=f"cluster.{name}.complaints", text="\n".join(found))

    async def stop(self) -> None:
        """Stop all at once."""
        await asyncio.gather(*(stack.aclose() for stack in self._stacks))

    @property
    def left_s(self) -> float:
        """Time until the clusters must be stopped."""
        return self._stage.left_s - _STOP_S
