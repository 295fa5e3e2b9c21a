"""A decode worker that logs what its engine did, and makes NaN of chosen requests: `python -m ... --config FILE …`.

After a step that moved blocks, and after the first that computed tokens which only the device knew, a line on stderr
tells the counts so far. A request with `MARK` among its biases gets NaN for logits from its fourth token on.
"""

import sys
from collections.abc import Callable
from typing import Any

from decode_worker.__main__ import serve
from engine.runner.block_mover import BlockMover
from engine.sampling.sampler import Sampler
from engine.types.step_inputs import StepInputs
from tandem.process.lifetime import end, worker_main
from tandem.values.roles import WorkerRole

MARK = (7, 13.5)
NAMES = ("saved", "loaded", "copied", "ahead")


def observe() -> None:
    """From now on every step of this process is counted."""
    counts = dict.fromkeys(NAMES, 0)
    move = BlockMover.move

    def observed(self: BlockMover, inputs: StepInputs) -> None:
        move(self, inputs)
        steps = (inputs.offloads, inputs.loads, inputs.copies, inputs.feeds)
        is_reported = any(map(len, steps[:3])) or (len(inputs.feeds) > 0 and not counts["ahead"])
        for name, part in zip(NAMES, steps, strict=True):
            counts[name] += len(part)
        if is_reported:
            sys.stderr.write("observed " + " ".join(f"{name}={count}" for name, count in counts.items()) + "\n")

    BlockMover.move = observed  # type: ignore[method-assign]


def make_nan() -> None:
    """Of the logits of marked requests."""
    choose: Callable[..., Any] = Sampler.choose

    def poisoned(self: Sampler, logits: Any, rows: Any) -> Any:
        for i, row in enumerate(rows):
            request = row.request
            if request.params.logit_bias.get(MARK[0]) == MARK[1] and row.num_tokens - request.num_prompt_tokens >= 3:
                logits[i, 5] = float("nan")
        return choose(self, logits, rows)

    Sampler.choose = poisoned  # type: ignore[method-assign]


def observed(lines: list[str], name: str) -> int:
    """Return the largest count of this name that any worker has logged."""
    reports = [line.partition("observed ")[2].split() for line in lines if "observed " in line]
    return max(
        (int(pair.partition("=")[2]) for pairs in reports for pair in pairs if pair.startswith(f"{name}=")), default=0
    )


if __name__ == "__main__":
    observe()
    make_nan()
    end(worker_main(WorkerRole.DECODE, serve))
