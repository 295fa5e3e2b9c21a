"""Profiles of a running process: counts, output and duration."""

import asyncio
import os
import sys
import threading
from xml.etree import ElementTree

from tandem.profiling.flame import flame_svg
from tandem.profiling.sampler import StackSampler
from tandem.profiling.stacks import MAX_DEPTH, StackTally, collapsed, speedscope

_SVG = "{http://www.w3.org/2000/svg}"


def tally_of(*stacks: str) -> StackTally:
    made = StackTally()
    for stack in stacks:
        made.add(stack.split())
    return made


def test_collapsed_stacks_merge_equal_ones():
    assert collapsed(tally_of("a b", "a b", "a c", "a")) == "a 1\na;b 2\na;c 1\n"
    made = StackTally()
    made.add(["a;b"])
    assert collapsed(made) == "a:b 1\n"


def test_stack_tally_overflow_is_counted():
    made = StackTally(max_stacks=2)
    for stack in ("a", "b", "c", "d", "a"):
        made.add([stack])
    assert dict(made) == {("a",): 2, ("b",): 1, ("(other stacks)",): 2}
    assert made.num_samples == 5
    deep = StackTally()
    deep.add([str(depth) for depth in range(10 * MAX_DEPTH)])
    [(stack, _)] = deep
    assert len(stack) == MAX_DEPTH
    assert stack[-1] == "(deeper)"


def test_speedscope_names_every_frame_once_and_weighs_in_seconds():
    document = speedscope(tally_of("a b", "a b", "a"), name="router", period_s=0.5)
    frames = [frame["name"] for frame in document["shared"]["frames"]]
    [profile] = document["profiles"]
    shown = {
        " ".join(frames[index] for index in sample): weight
        for sample, weight in zip(profile["samples"], profile["weights"], strict=True)
    }
    assert shown == {"a": 0.5, "a b": 1.0}
    assert profile["endValue"] == 1.5
    assert len(frames) == len(set(frames)) == 2


def test_flame_graph_width_is_share_of_samples():
    picture = ElementTree.fromstring(flame_svg(tally_of("a b", "a b", "a b", "a <c>"), title="x & y"))
    boxes = {
        group.findtext(f"{_SVG}title"): group.find(f"{_SVG}rect")
        for group in picture.iter(f"{_SVG}g")
        if group.find(f"{_SVG}rect") is not None
    }
    assert set(boxes) == {"all: 4", "a: 4", "b: 3", "<c>: 1"}
    widths = {name: float(box.get("width")) for name, box in boxes.items()}
    assert widths["all: 4"] == widths["a: 4"] == 1200.0
    assert widths["b: 3"] == 3 * widths["<c>: 1"]
    assert float(boxes["<c>: 1"].get("x")) + widths["<c>: 1"] <= float(boxes["b: 3"].get("x"))
    assert ElementTree.fromstring(flame_svg(StackTally(), title="nothing")) is not None


class Seen(StackSampler):
    """Reports when it has seen a frame."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wanted: str) -> None:
        super().__init__(loop, period_s=0.001)
        self._wanted = wanted
        self.found = threading.Event()

    def _look(self) -> None:
        super()._look()
        if any(self._wanted in ";".join(stack) for stack, _ in self.tally):
            self.found.set()


async def test_stack_sampler_shows_coroutine_of_running_task():
    sampler = Seen(asyncio.get_running_loop(), "busy_with")

    async def busy_with(secret: str) -> None:
        while not sampler.found.is_set():
            sum(range(1000))

    looking = asyncio.create_task(asyncio.to_thread(sampler.run, 60.0))
    await asyncio.create_task(busy_with("a prompt"), name="request-of-somebody")
    sampler.stop()
    text = collapsed(await looking)
    [line] = [line for line in text.splitlines() if "busy_with" in line and "task " in line][:1]
    assert line.startswith("event loop;task test_stack_sampler_shows_coroutine_of_running_task.<locals>.busy_with;")
    assert "(tests/unit/tandem/profiling/test_profiling.py)" in line
    assert "request-of-somebody" not in text
    assert "a prompt" not in text


async def test_stack_sampler_ends_at_timeout_or_stop():
    sampler = StackSampler(asyncio.get_running_loop(), period_s=0.001)
    assert (await asyncio.to_thread(sampler.run, 0.01)).num_samples > 0
    sampler.stop()
    before = sampler.tally.num_samples
    assert (await asyncio.to_thread(sampler.run, 600.0)).num_samples == before


async def test_stack_sampler_samples_computing_between_system_calls():
    """A system call lets other threads in, so a sampler that waits politely sees hardly anything else."""
    usual_s = sys.getswitchinterval()
    sampler = StackSampler(asyncio.get_running_loop(), period_s=0.001)
    looking = asyncio.create_task(asyncio.to_thread(sampler.run, 60.0))
    await asyncio.sleep(0)
    sink = os.open(os.devnull, os.O_WRONLY)
    while sampler.tally.num_samples < 1000:
        compute_for_a_while()
        os.write(sink, b"x")
    os.close(sink)
    sampler.stop()
    counts = {True: 0, False: 0}
    for stack, count in await looking:
        if any("test_stack_sampler_samples_computing" in frame for frame in stack):
            counts["compute_for_a_while" in stack[-1]] += count
    assert counts[True] > counts[False], counts
    assert sys.getswitchinterval() == usual_s


def compute_for_a_while() -> int:
    total = 0
    for number in range(15_000):  # a millisecond: less than the interval after which a polite sampler gets its turn
        total += number
    return total
