"""Where the router's processor time goes: microseconds of each stage of one chat request, and of one streamed token.

A router samples its own processor time (`tandem_bench.router.variants.sampled_router`) while it is loaded as by
`doors`. A sample counts for the stage of its innermost frame that belongs to one, so helpers count for their callers.
The stages of the event loop's thread share the time that the kernel counted for that thread, so that the table adds
up. A token carries its share of its request's cost.
"""

import os
import select
import signal
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tandem.profiling.flame import flame_svg
from tandem.profiling.stacks import StackTally
from tandem_bench.errors import CannotMeasure
from tandem_bench.report import Row, figure
from tandem_bench.router.costs import NUM_CLIENTS, NUM_STREAMS, STREAM_TOKENS, chat_body, cluster, run_client

REQUESTS = 6_000
STREAMS = 16 * NUM_STREAMS
ANSWER_TOKENS = 16
_WRITE_S = 10.0
REST = "event loop: polling, reading, callbacks, tasks"
OTHER_THREADS = "other threads (gRPC's, the tokenizer's)"

STAGES: Mapping[str, tuple[str, ...]] = {
    "HTTP: head, connection, ASGI": ("router/http/server/", "httptools_impl.py", "flow_control.py", "starlette/"),
    "access and routing": ("router/access/", "router/http/routing/", "router/http/app.py", "fastapi/"),
    "body: JSON and validation": (
        "router/http/body/json_body.py",
        "router/http/body/strict_body.py",
        "router/api/request/strict_json.py",
        "router/http/openai/schemas.py",
        "router/http/openai/chat_messages.py",
        "router/http/openai/response_format.py",
        "router/http/openai/tool_schemas.py",
        "pydantic/",
    ),
    "template and tokenizing": (
        "router/text/chat_template.py",
        "router/text/conversation.py",
        "router/text/tokenizer.py",
        "router/api/prompts.py",
        "jinja2/",
        "<template>",
    ),
    "request: checks, defaults, id": (
        "router/api/frontend.py",
        "router/api/request/",
        "router/http/openai/generation.py",
        "router/text/grammars/",
        "router/text/reasoning.py",
        "router/text/stop_strings.py",
        "tandem/values/sampling.py",
    ),
    "block hashing": ("tandem/values/block_hash.py",),
    "admission": ("router/admission/", "router/dispatch/admission_queue.py"),
    "placement": ("router/placement/", "router/workers/"),
    "dispatch": ("router/dispatch/",),
    "session with workers": ("router/fleet/", "tandem/protocol/", "grpc/", "aio/_call.py"),
    "text of the answer": ("router/text/detokenizer.py", "router/text/decoder_steps.py", "router/api/"),
    "metrics": ("router/metrics/", "router/api/request_meter.py", "router/tenants/", "prometheus_client/"),
    "answer": ("router/http/",),
    "logging and tracing": ("logging/", "tandem/telemetry/"),
}
"""Beginnings of the file names of each stage's frames, libraries' also after a folder; the longest counts."""
_FOLDERS = frozenset(part for parts in STAGES.values() for part in parts if part.endswith("/"))
"""Folders at the root, or of a package: not of the same name elsewhere, such as `router/grpc/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What one unit of work costs, in microseconds of processor time."""

    name: str
    by_stage: Mapping[str, float]
    tally: StackTally

    @property
    def total_us(self) -> float:
        return sum(self.by_stage.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """How many Python functions are called for one unit of work."""

    name: str
    by_stage: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.by_stage.values())


def stage_of(stack: Iterable[str]) -> str:
    """Return the stage of a stack, outermost frame first."""
    for frame in reversed(tuple(stack)):
        file = frame.rpartition(" (")[2]
        if matches := [
            (len(part), stage)
            for stage, parts in STAGES.items()
            for part in parts
            if file.startswith(part) or (part not in _FOLDERS and f"/{part}" in file)
        ]:
            return max(matches)[1]
    return REST


def divide(tally: StackTally, *, loop_us: float, other_us: float) -> dict[str, float]:
    """Divide the event loop's microseconds among stages by samples, largest first. Raises CannotMeasure."""
    counts: Counter[str] = Counter()
    for stack, count in tally:
        counts[stage_of(stack)] += count
    if not (total := counts.total()):
        raise CannotMeasure("the router has not been sampled: it was idle")
    return {stage: loop_us * count / total for stage, count in counts.most_common()} | {OTHER_THREADS: other_us}


def measure(*, num_workers: int = 2, requests: int = REQUESTS, streams: int = STREAMS) -> tuple[Budget, Budget]:
    """Return what a chat request costs, and a streamed token. Raises CannotMeasure."""
    request, token = _watch("sampled_router", num_workers=num_workers, requests=requests, streams=streams)
    return request.budget("chat request", units=requests), token.budget("streamed token", units=streams * STREAM_TOKENS)


def count_calls(*, num_workers: int = 2, requests: int = 400, streams: int = NUM_STREAMS) -> tuple[Calls, Calls]:
    """Return how many Python functions are called for a chat request, and for a token. Raises CannotMeasure."""
    request, token = _watch("counted_router", num_workers=num_workers, requests=requests, streams=streams)
    return request.calls("chat request", units=requests), token.calls("streamed token", units=streams * STREAM_TOKENS)


def _watch(kind: str, *, num_workers: int, requests: int, streams: int) -> tuple["_Watched", "_Watched"]:
    """Load a router of this kind with chat requests, then with streams; return what was seen of each."""
    with tempfile.TemporaryDirectory(prefix="bench-budget-") as folder:
        stacks = Path(folder) / "stacks"
        os.mkfifo(stacks, 0o600)
        module = (f"tandem_bench.router.variants.{kind}", str(stacks))
        with cluster(num_workers=num_workers, module=module) as (url, router):
            by_request, by_token = _Watched(router, stacks), _Watched(router, stacks)
            body = chat_body(max_tokens=ANSWER_TOKENS, stream=False)
            run_client(url, body, connections=NUM_CLIENTS, requests=max(NUM_CLIENTS, requests // 4))
            with by_request:
                _run(url, body, connections=NUM_CLIENTS, requests=requests)
            body = chat_body(max_tokens=STREAM_TOKENS, stream=True)
            run_client(url, body, connections=NUM_STREAMS, requests=NUM_STREAMS)
            with by_token:
                _run(url, body, connections=NUM_STREAMS, requests=streams, events=streams * STREAM_TOKENS)
    return by_request, by_token


def _run(url: str, body: Mapping[str, object], *, connections: int, requests: int, events: int = 0) -> None:
    done = run_client(url, body, connections=connections, requests=requests)
    if done["bad"] or done["requests"] != requests or done["events"] < events:
        raise CannotMeasure(f"the router did not answer everything: {done}")


class _Watched:
    """What is seen of a router while inside: samples or calls, and processor time."""

    def __init__(self, process: psutil.Process, stacks: Path) -> None:
        self._process = process
        self._stacks = stacks
        self._before = (0.0, 0.0)
        self._spent_s = (0.0, 0.0)
        self._tally = StackTally()

    def __enter__(self) -> None:
        self._before = self._cpu_s()
        self._process.send_signal(signal.SIGUSR1)

    def __exit__(self, error: type[BaseException] | None, *_more: object) -> None:
        if error is not None:
            return
        after, before = self._cpu_s(), self._before
        self._spent_s = (after[0] - before[0], after[1] - before[1])
        self._tally = StackTally()
        for line in self._written().splitlines():
            stack, _, count = line.rpartition(" ")
            self._tally.add(stack.split(";"), int(count))

    def _written(self) -> str:
        """End the sampling, and return what the router writes into the FIFO until it closes it."""
        fifo, written = os.open(self._stacks, os.O_RDONLY | os.O_NONBLOCK), bytearray()
        try:
            self._process.send_signal(signal.SIGUSR2)
            while select.select([fifo], [], [], _WRITE_S)[0]:
                if not (part := os.read(fifo, 1 << 16)):
                    return written.decode()
                written += part
        finally:
            os.close(fifo)
        raise CannotMeasure("the router wrote no samples")

    def budget(self, name: str, *, units: int) -> Budget:
        """Divide what was spent inside among `units` of work."""
        loop_us, other_us = (1e6 * seconds / units for seconds in self._spent_s)
        by_stage = divide(self._tally, loop_us=loop_us, other_us=other_us)
        return Budget(name=name, by_stage=by_stage, tally=self._tally)

    def calls(self, name: str, *, units: int) -> Calls:
        """Divide the calls that were counted inside among `units` of work."""
        counts: Counter[str] = Counter()
        for stack, count in self._tally:
            counts[stage_of(stack)] += count
        return Calls(name=name, by_stage={stage: count / units for stage, count in counts.most_common()})

    def _cpu_s(self) -> tuple[float, float]:
        """Processor time of the event loop's thread, and of all others, so far."""
        threads = {one.id: one.user_time + one.system_time for one in self._process.threads()}
        loop_s = threads.pop(self._process.pid)
        return loop_s, sum(threads.values())


def rows(flames: Path | None = None) -> list[Row]:
    """Measure, and return every stage of both; `flames`: a folder for their flame graphs. Raises CannotMeasure."""
    found: list[Row] = []
    for budget in measure():
        found += [figure(f"{budget.name}: {stage}", us, "us") for stage, us in budget.by_stage.items()]
        found.append(figure(f"{budget.name}: all of it", budget.total_us, "us"))
        if flames is not None:
            title = f"tandem router, {budget.name}, {budget.total_us:.0f} us of processor time"
            file = flames / f"{budget.name.replace(' ', '-')}.svg"
            file.write_text(flame_svg(budget.tally, title=title), encoding="utf-8")
    for calls in count_calls():
        found += [figure(f"calls for a {calls.name}: {stage}", count, "") for stage, count in calls.by_stage.items()]
        found.append(figure(f"calls for a {calls.name}: all of them", calls.total, ""))
    return found
