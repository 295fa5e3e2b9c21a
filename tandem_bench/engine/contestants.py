"""The measured engines behind one small protocol: Tandem's in process, Tandem's worker, and the peers."""

import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from tandem.config.engine import EngineSection
from tandem_bench.cache import cache_dir
from tandem_bench.client import Client, Completion
from tandem_bench.clusters import COLOCATED, RunningCluster, Setup, running
from tandem_bench.engine.footprint import Footprint, Watch
from tandem_bench.engine.workload import Job, Outcome, outcome
from tandem_bench.errors import CannotMeasure
from tandem_bench.peers.environments import ENVIRONMENTS, ensure
from tandem_bench.peers.process import EngineProcess, Launch, Started
from tandem_bench.prompts import Prompt

TANDEM = "tandem"
PLAIN = "tandem bfloat16"
"""Tandem with the weights as they are, beside Tandem and peers with fewer bits."""
WORKER = "tandem worker"
TAKES_NO_NEWCOMERS = frozenset({"transformers"})
"""Engines whose running batch other requests cannot join."""
_FILE_TYPES: Mapping[int | None, tuple[str, ...]] = {None: ("bf16",), 8: ("q8_0",), 4: ("q4_0", "q4_k_m")}
"""llama.cpp's formats by bits."""
_VLLM_GROUP = 128
"""Columns with one scale, in four bits: what published checkpoints have and vLLM's kernels are made for."""
_PEER_KV_GIB = 1
"""KV memory of the peers: more than they need for the largest job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Conditions of a measurement, the same for all engines."""

    model: Path
    dtype: str
    num_threads: int
    device: str
    max_model_len: int
    max_num_seqs: int
    num_blocks: int
    """Blocks of Tandem's KV pool."""
    settings: Mapping[str, Any]
    """Further settings of Tandem's engine section, by dotted name."""
    bits: int | None = None
    """Bits of the weights, which engines quantize in their own ways; None: as the model has them."""

    def engine_section(self) -> dict[str, Any]:
        return {"device": self.device, "num_blocks": self.num_blocks, "num_threads": self.num_threads}

    def overrides(self) -> dict[str, Any]:
        """Return Tandem's configuration by dotted names."""
        engine = {f"engine.{name}": value for name, value in self.engine_section().items()}
        model = {"model.path": str(self.model), "model.dtype": self.dtype, "model.max_model_len": self.max_model_len}
        return model | engine | dict(self.settings)

    def plain(self) -> "Stage":
        """Return these conditions with the weights as the model has them."""
        settings = {name: value for name, value in self.settings.items() if name != "engine.quantization"}
        return replace(self, settings=settings, bits=None)

    def peer_options(self) -> dict[str, Any]:
        """Return the options that the peers' adapters support."""
        return {
            "model": str(self.model),
            "dtype": self.dtype,
            "num_threads": self.num_threads,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "kv_gib": _PEER_KV_GIB,
        }


class Contestant(Protocol):
    """Engine that is started once, given many jobs, and stopped."""

    @property
    def name(self) -> str: ...

    async def start(self) -> Started:
        """Start the engine and wait until it is ready. Raises CannotMeasure."""
        ...

    async def run(self, job: Job) -> Outcome:
        """Run one job, alone on the machine. Raises CannotMeasure."""
        ...

    @property
    def footprint(self) -> Footprint:
        """Return the peak memory so far."""
        ...

    async def stop(self) -> None: ...


class ProcessContestant:
    """Engine in a process of its own, driven directly."""

    def __init__(self, name: str, launch: Launch) -> None:
        self.name = name
        self._process = EngineProcess(launch)
        self._watch = Watch()

    async def start(self) -> Started:
        await self._process.spawn()
        async with self._watch.over(self._process.pid):
            return await self._process.ready()

    async def run(self, job: Job) -> Outcome:
        message = {"prompts": job.prompts, "num_tokens": job.num_tokens, "newcomers": job.newcomers}
        async with self._watch.over(self._process.pid):
            reply = await self._process.run(message)
        return outcome(job, reply)

    @property
    def footprint(self) -> Footprint:
        return self._watch.peak

    async def stop(self) -> None:
        await self._process.stop()


class WorkerContestant:
    """Colocated cluster from the command line, used over HTTP: what a client sees of the same engine."""

    name = WORKER

    def __init__(self, stage: Stage) -> None:
        # The default settings, whatever the other benchmarks use.
        engine = EngineSection().model_dump() | stage.engine_section()
        engine |= {name.removeprefix("engine."): value for name, value in stage.settings.items()}
        model = {"path": str(stage.model), "max_model_len": stage.max_model_len}
        self._setup = Setup(mode=COLOCATED, dtype=stage.dtype, engine=engine, model=model)
        self._stack = AsyncExitStack()
        self._watch = Watch()
        self._cluster: RunningCluster | None = None
        self._client: Client | None = None

    async def start(self) -> Started:
        self._cluster = await self._stack.enter_async_context(running(self._setup))
        self._client = await self._stack.enter_async_context(Client(self._cluster.url))
        return Started(ready_s=self._cluster.ready_s, load_s=self._cluster.ready_s, about={})

    async def run(self, job: Job) -> Outcome:
        """Run a job over HTTP; ValueError for a job with newcomers, which clients cannot add to a running batch."""
        if self._client is None or self._cluster is None or job.newcomers:
            raise ValueError("the worker is not running, or the job has newcomers, which HTTP does not support")
        prompts = [Prompt(token_ids=prompt) for prompt in job.prompts]
        async with self._watch.over(self._cluster.pids[0]):
            answers = await self._client.complete_all(prompts, max_tokens=job.num_tokens, concurrency=len(job.prompts))
        return Outcome(
            job=job,
            arrivals_s=tuple(map(arrivals, answers)),
            tokens=tuple(answer.token_ids for answer in answers),
        )

    @property
    def footprint(self) -> Footprint:
        """Return the peak memory, including router and supervisor."""
        return self._watch.peak

    async def stop(self) -> None:
        await self._stack.aclose()


def arrivals(answer: Completion) -> tuple[float, ...]:
    """Return the arrival time of each token from the gaps; tokens of one message share its gap."""
    # The first message's tokens arrived together and have no gap.
    missing = len(answer.token_ids) - len(answer.gaps_s)
    times = [answer.first_token_s] * missing
    for gap_s in answer.gaps_s:
        times.append(times[-1] + gap_s)
    return tuple(times)


def tandem(stage: Stage, name: str = TANDEM) -> ProcessContestant:
    """Launch Tandem's engine in this environment."""
    # Its modules are found wherever this one was, installed or not.
    root = str(Path(__file__).parents[2])
    return ProcessContestant(
        name,
        Launch(
            name=name,
            python=Path(sys.executable),
            adapter=str(Path(__file__).with_name("on_tandem.py")),
            options={"overrides": stage.overrides()},
            environment={"PYTHONPATH": root},
        ),
    )


def ours(stage: Stage) -> list[ProcessContestant]:
    """Launch Tandem's engine; where weights are quantized, also with the weights as they are."""
    return [tandem(stage), *([tandem(stage.plain(), PLAIN)] if stage.bits is not None else [])]


def peer(name: str, stage: Stage, note: Callable[[str], None]) -> list[ProcessContestant]:
    """Launch a peer in its own environment, which is created if missing; once for each of its formats.

    Raises PeerNotInstalled; CannotMeasure where it has no weights of so few bits.
    """
    if name == "transformers" and stage.bits is not None:
        raise CannotMeasure("--bits: transformers multiplies in no fewer bits on a CPU")
    environment = ENVIRONMENTS[name]
    python = ensure(environment, note)
    options = stage.peer_options()
    variables: dict[str, str] = {}
    converted = f"{stage.model.name}-{environment.folder.name}"
    if name == "openvino":
        suffix = "" if stage.bits is None else f"-int{stage.bits}"
        options |= {"converted": str(cache_dir("openvino") / f"{converted}{suffix}"), "bits": stage.bits}
    elif name == "vllm":
        options["model"] = str(_for_vllm(stage, note))
        variables = _vllm_variables(environment.folder, options)
    elif name == "llama.cpp":
        options["converted"] = str(cache_dir("llama.cpp") / converted)
        return [
            _launched(f"{name} {file_type}", "on_llama_cpp.py", python, options | {"file_type": file_type}, {})
            for file_type in _FILE_TYPES[stage.bits]
        ]
    return [_launched(name, f"on_{name}.py", python, options, variables)]


def _launched(
    name: str, adapter: str, python: Path, options: Mapping[str, Any], variables: Mapping[str, str]
) -> ProcessContestant:
    launch = Launch(name=name, python=python, adapter=adapter, options=dict(options), environment=dict(variables))
    return ProcessContestant(name, launch)


def _for_vllm(stage: Stage, note: Callable[[str], None]) -> Path:
    """Return the model with weights as vLLM reads them, made on first use: W8A8 or W4A16 of compressed-tensors."""
    if stage.bits is None:
        return stage.model
    from engine.quantize.model_quantizer import quantize_model
    from engine.quantize.settings import QuantizationSettings, Scheme

    scheme, group_size = (Scheme.INT8, None) if stage.bits == 8 else (Scheme.INT4, _VLLM_GROUP)
    folder = cache_dir("models") / f"{stage.model.name}-{scheme.value}"
    if not folder.exists():
        note(f"quantizing the model for vLLM in {folder}, once")
        settings = QuantizationSettings.resolve(scheme, method=None, group_size=group_size, is_calibrated=False)
        quantize_model(stage.model, folder, settings)
    return folder


def _vllm_variables(folder: Path, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that vLLM's documentation for CPUs advises, except OMP_NUM_THREADS."""
    preload = [folder / "lib" / "libiomp5.so", *Path("/usr/lib/x86_64-linux-gnu").glob("libtcmalloc_minimal.so.4")]
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(options["kv_gib"]),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{options['num_threads'] - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "LD_PRELOAD": ":".join(str(path) for path in preload if path.exists()),
    }
