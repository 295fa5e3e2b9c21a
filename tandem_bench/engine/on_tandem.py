"""Adapter of Tandem's own engine to the protocol of the peers; runs in Tandem's environment."""

import dataclasses
from typing import Any

from tandem_bench.engine.rig import Rig, assemble_from
from tandem_bench.engine.workload import Job


class Adapter:
    """Engine assembled as in a worker; see host.Adapter."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._rig = Rig(assemble_from(options["overrides"]))
        parts = self._rig.parts
        self.about = {
            **parts.facts(),
            "max_batched_tokens": parts.config.max_batched_tokens,
            "prefill_chunk_tokens": parts.config.prefill_chunk_tokens,
            "backend": parts.runner.model.backend.name,
        }

    def run(self, prompts: list[list[int]], num_tokens: int, newcomers: list[list[int]]) -> dict[str, Any]:
        """Run a job as host.Adapter does, and also return where the steps' time went."""
        job = Job(prompts=tuple(map(tuple, prompts)), num_tokens=num_tokens, newcomers=tuple(map(tuple, newcomers)))
        done = self._rig.run(job)
        return {
            "arrivals_s": done.arrivals_s,
            "tokens": done.tokens,
            "num_newcomers": done.num_newcomers,
            "steps": None if done.steps is None else dataclasses.asdict(done.steps),
        }

    def close(self) -> None:
        """Stop the engine's thread."""
        self._rig.__exit__()
