"""The cheapest cluster that meets the objectives for a load: worker kinds (tensor-parallel sizes), batch limits, P:D
ratio.

For each design (which kind in which pool, how many sequences per step, colocated or not) the number of workers is
searched: it starts at what the work alone requires, grows where an objective is missed (TTFT: one more prefill worker;
ITL: one more decode worker) and shrinks as long as all are met. The objective that one worker fewer misses is the
reason for each worker. The search assumes that more workers are never worse: a design is a local optimum, found by
simulation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from cluster.simulator.inputs.latency import StepLatency
from cluster.simulator.inputs.latency_files import load_latency
from cluster.simulator.model.report import Report
from cluster.simulator.model.settings import ClusterSpec, Network, PoolSpec, engine_config
from cluster.simulator.studies.capacity import Trial, what_breaks
from tandem.errors import ConfigError

_TYPICAL_ROWS = 16
"""Assumed number of sequences that share a decode step, for the first guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKind:
    """Kind of worker that a cluster can be built of."""

    name: str
    gpus: int
    """Cost of one worker, in GPUs."""
    latency: StepLatency
    kv_tokens: int

    @classmethod
    def parse(cls, text: str) -> "WorkerKind":
        """Parse `gpus=8,kv_tokens=1200000,latency=PROFILE`; the latency comes last. ConfigError for anything else."""
        head, found, latency = text.partition("latency=")
        try:
            values = {name: int(value) for name, value in (part.split("=", 1) for part in head.split(",") if part)}
            gpus, kv_tokens = values.pop("gpus"), values.pop("kv_tokens")
        except (KeyError, ValueError) as error:
            raise ConfigError(f"--worker must be gpus=N,kv_tokens=N,latency=PROFILE, not {text!r}") from error
        if not found or values or gpus < 1 or kv_tokens < 1:
            raise ConfigError(f"--worker must be gpus=N,kv_tokens=N,latency=PROFILE, not {text!r}")
        return cls(name=f"tp{gpus}", gpus=gpus, latency=load_latency(latency), kv_tokens=kv_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Everything except the numbers of workers."""

    prefill: WorkerKind | None
    """Kind of prefill workers; None: colocated."""
    decode: WorkerKind
    max_running: int

    @property
    def name(self) -> str:
        pools = (
            f"colocated {self.decode.name}" if self.prefill is None else f"{self.prefill.name} -> {self.decode.name}"
        )
        return f"{pools}, batch {self.max_running}"


Sizes = tuple[int, int]
"""Number of prefill workers and number of decode workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Result of the search for one design."""

    design: Design
    sizes: Sizes
    gpus: int
    report: Report | None
    """Report of the chosen size; None if no size within the bound meets the objectives."""
    why: tuple[str, ...]
    """Objectives that one worker fewer misses, or that the largest size misses."""


def designs(kinds: Sequence[WorkerKind], batch_limits: Sequence[int]) -> Iterator[Design]:
    """Yield every design, colocated first."""
    for prefill in (None, *kinds):
        for decode in kinds:
            for max_running in batch_limits:
                yield Design(prefill=prefill, decode=decode, max_running=max_running)


def plan(trial: Trial, kinds: Sequence[WorkerKind], batch_limits: Sequence[int], *, max_gpus: int) -> list[Plan]:
    """Plan each design at its best size; those that meet the objectives come first, the cheapest at the top."""
    found = [_Search(trial, design, max_gpus).run() for design in designs(kinds, batch_limits)]
    return sorted(found, key=lambda p: (p.report is None, p.gpus, 0.0 if p.report is None else p.report.ttft_ms.p99))


class _Search:
    """Search over the sizes of one design; no size is simulated twice."""

    def __init__(self, trial: Trial, design: Design, max_gpus: int) -> None:
        self._trial = trial
        self._design = design
        self._max_gpus = max_gpus
        self._reports: dict[Sizes, Report] = {}

    def run(self) -> Plan:
        sizes = self._guess()
        while self._gpus(sizes) <= self._max_gpus and not (report := self._simulate(sizes)).held:
            sizes = self._grown(sizes, what_breaks(report))
        if self._gpus(sizes) > self._max_gpus:
            broken = [what_breaks(report) for report in self._reports.values()]
            why: tuple[str, ...] = (
                f"misses {broken[-1]} up to {self._max_gpus} GPUs" if broken else "needs more GPUs than allowed",
            )
            return Plan(design=self._design, sizes=sizes, gpus=self._gpus(sizes), report=None, why=why)
        while (smaller := self._smaller_that_holds(sizes)) is not None:
            sizes = smaller
        why = tuple(self._why(smaller) for smaller in self._smaller(sizes))
        return Plan(design=self._design, sizes=sizes, gpus=self._gpus(sizes), report=self._simulate(sizes), why=why)

    def _guess(self) -> Sizes:
        """Return the sizes for the work if nothing were cached and all workers were always busy."""
        design, trace = self._design, self._trial.trace
        span_s = max(1e-9, trace.span_s)
        prefill = (design.prefill or design.decode).latency
        prefill_s = sum(prefill.prompt_seconds(0, r.num_prompt_tokens, 2048) for r in trace.requests)
        decode_s = trace.num_output_tokens * design.decode.latency.step_s / min(design.max_running, _TYPICAL_ROWS)
        if design.prefill is None:
            return 0, max(1, ceil((prefill_s + decode_s) / span_s))
        return max(1, ceil(prefill_s / span_s)), max(1, ceil(decode_s / span_s))

    def _grown(self, sizes: Sizes, broken: str) -> Sizes:
        prefill, decode = sizes
        if self._design.prefill is None or broken == "ITL":
            return prefill, decode + 1
        return (prefill + 1, decode) if broken == "TTFT" else (prefill + 1, decode + 1)

    def _smaller(self, sizes: Sizes) -> list[Sizes]:
        """Return the sizes with one worker fewer, the more expensive one first."""
        prefill, decode = sizes
        less = [(prefill - 1, decode)] if self._design.prefill is not None and prefill > 1 else []
        less += [(prefill, decode - 1)] if decode > 1 else []
        return sorted(less, key=self._gpus)

    def _smaller_that_holds(self, sizes: Sizes) -> Sizes | None:
        return next((smaller for smaller in self._smaller(sizes) if self._simulate(smaller).held), None)

    def _why(self, smaller: Sizes) -> str:
        return f"{ratio(smaller)} misses {what_breaks(self._simulate(smaller))}"

    def _gpus(self, sizes: Sizes) -> int:
        prefill = 0 if self._design.prefill is None else sizes[0] * self._design.prefill.gpus
        return prefill + sizes[1] * self._design.decode.gpus

    def _simulate(self, sizes: Sizes) -> Report:
        if sizes not in self._reports:
            self._reports[sizes] = self._trial.run(self._spec(sizes))
        return self._reports[sizes]

    def _spec(self, sizes: Sizes) -> ClusterSpec:
        design, block_tokens = self._design, self._trial.trace.block_tokens

        def pool(kind: WorkerKind, num_workers: int, max_step_s: float | None) -> PoolSpec:
            engine = engine_config(
                num_blocks=max(2, kind.kv_tokens // block_tokens),
                block_size=block_tokens,
                max_running_requests=design.max_running,
                max_step_s=max_step_s,
            )
            return PoolSpec(num_workers=num_workers, engine=engine, latency=kind.latency)

        return ClusterSpec(
            prefill=None if design.prefill is None else pool(design.prefill, sizes[0], None),
            decode=pool(design.decode, sizes[1], self._trial.slo.itl_s),
            network=Network(),
        )


def ratio(sizes: Sizes) -> str:
    """Render prefill workers to decode workers, or the number of workers that do both."""
    return f"{sizes[0]}:{sizes[1]}" if sizes[0] else str(sizes[1])
