"""Time to the first token of a long prompt, by the source of the prefix's KV.

`python -m tandem_bench.tiers` serves long prompts on a real engine, one at a time, with a pool hardly larger than one
of them:

- *recompute*: the prompt is new;
- *pool*: it was requested just before;
- *host*: another prompt has since moved it to host memory;
- *disk*: another process computed it; the files are in the system's page cache;
- *disk, cold*: the system was requested to drop them from it (posix_fadvise), which a virtual disk's host need not do.

The engine decides by itself, from rates that it has measured: a figure counts only when the tokens came from the stated
source, and when the answer equals the computed one.
"""

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from engine.kv_storage.block_file import SUFFIX
from engine.kv_storage.disk_store import file_bytes
from engine.tier_assembly import keep_cached
from engine.types.tier_counts import TierCounts
from tandem.errors import ConfigError
from tandem_bench import report
from tandem_bench.engine.rig import Rig, assemble_from
from tandem_bench.engine.workload import Job, Tokens
from tandem_bench.errors import CannotMeasure
from tandem_bench.make_model import cached_model
from tandem_bench.report import Row, figure
from tandem_bench.shapes import SHAPES, Shape

BLOCK_TOKENS = 16
SOURCES = ("recompute", "pool", "host", "disk", "disk, cold")
_KEEP_S = 120.0
_EXIT_CANNOT_MEASURE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Model and size of the prompts."""

    shape: Shape
    prompt_tokens: int
    num_prompts: int
    folder: Path

    @property
    def prompt_blocks(self) -> int:
        """Number of full blocks of a prompt, whose KV can be found."""
        return (self.prompt_tokens - 1) // BLOCK_TOKENS

    @property
    def block_bytes(self) -> int:
        return 2 * 2 * BLOCK_TOKENS * self.shape.num_layers * self.shape.num_kv_heads * self.shape.head_dim

    def prompts(self) -> list[Tokens]:
        draw = random.Random(7)
        return [
            tuple(draw.randrange(3, self.shape.vocab_size) for _ in range(self.prompt_tokens))
            for _ in range(self.num_prompts)
        ]

    def overrides(self) -> Mapping[str, Any]:
        """Return the configuration: a pool for one prompt, host memory for several, a disk for all."""
        return {
            "model.path": str(cached_model(self.shape)),
            "model.dtype": "bfloat16",
            "model.max_model_len": self.prompt_tokens + 2 * BLOCK_TOKENS,
            "engine.num_blocks": self.prompt_blocks + 4,
            "engine.host_cache_bytes": 6 * self.prompt_blocks * self.block_bytes,
            "engine.disk_cache_bytes": (self.num_prompts + 1) * self.prompt_blocks * file_bytes(self.block_bytes),
            "engine.disk_cache_path": str(self.folder),
        }


class Server:
    """Engine over the folder, from start to end."""

    def __init__(self, setup: Setup) -> None:
        self._parts = assemble_from(dict(setup.overrides()))
        self._rig = Rig(self._parts)
        # The first steps of a process are slower: run them on a prompt that is not used again.
        self.complete(tuple(range(3, 3 + 4 * BLOCK_TOKENS)))

    def complete(self, prompt: Tokens) -> tuple[float, tuple[int, ...]]:
        """Return the seconds to the first token, and the answer."""
        outcome = self._rig.run(Job(prompts=(prompt,), num_tokens=2))
        return outcome.arrivals_s[0][0], outcome.tokens[0]

    def hits(self) -> dict[str, int]:
        """Return the blocks found in each tier so far."""
        counts: Sequence[TierCounts] = self._parts.scheduler.load().tiers
        return {one.tier: one.hits for one in counts}

    def close(self) -> None:
        """Stop the engine, leaving everything on disk."""
        self._rig.__exit__()
        tiers, disk = self._parts.scheduler.tiers, self._parts.disk
        if tiers is None or disk is None:
            raise CannotMeasure("the engine has no tiers")
        keep_cached(tiers, disk, timeout_s=_KEEP_S)
        disk.close()


class Figures:
    """Times by source, each counted only if the KV came from there."""

    def __init__(self, setup: Setup) -> None:
        self.times_s: dict[str, list[float]] = {source: [] for source in SOURCES}
        self._least = setup.prompt_blocks - 4  # the pool may have kept a few
        self._answers: dict[Tokens, tuple[int, ...]] = {}

    def measure(self, source: str, server: Server, prompt: Tokens) -> None:
        """Run a prompt and check the source of its prefix. Raises CannotMeasure for another answer or source."""
        before = server.hits()
        seconds, answer = server.complete(prompt)
        found = {tier: hits - before[tier] for tier, hits in server.hits().items()}
        if self._answers.setdefault(prompt, answer) != answer:
            raise CannotMeasure(f"{source}: the answer is not the one that was computed")
        tier = source.split(",", maxsplit=1)[0]
        if any((found[name] >= self._least) != (name == tier) for name in found):
            raise CannotMeasure(f"{source}: the prefix came from elsewhere ({found} blocks found)")
        self.times_s[source].append(seconds)


def measure(setup: Setup) -> Figures:
    """Run three engines: one computes, one reads what the first left, one reads it cold."""
    figures, prompts = Figures(setup), setup.prompts()
    server = Server(setup)
    for prompt in prompts:
        figures.measure("recompute", server, prompt)
    server.close()
    server = Server(setup)
    for last, prompt in zip((None, *prompts), prompts, strict=False):
        figures.measure("disk", server, prompt)
        figures.measure("pool", server, prompt)
        if last is not None:
            figures.measure("host", server, last)
    server.close()
    _drop_from_page_cache(setup.folder)
    server = Server(setup)
    for prompt in prompts:
        figures.measure("disk, cold", server, prompt)
    server.close()
    return figures


def _drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob(f"*{SUFFIX}"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages not written to the disk yet cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def rows(setup: Setup, figures: Figures) -> list[Row]:
    """Return medians and the share of computing for each."""
    made: list[Row] = []
    computing_s = median(figures.times_s["recompute"])
    for source, times_s in figures.times_s.items():
        name = f"tiers.{source.replace(', ', '_')}"
        made.append(figure(f"{name}.ttft", 1e3 * median(times_s), "ms"))
        if source != "recompute":
            made.append(figure(f"{name}.speedup", computing_s / median(times_s), "x recompute"))
    made.append(figure("tiers.prefix", setup.prompt_blocks * setup.block_bytes / 2**20, "MiB of KV"))
    return made


def main() -> int:
    """Print one table; return 2 when something could not be measured."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem_bench.tiers", description="Time to first token by cache tier."
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b", help="model of this geometry")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per prompt")
    parser.add_argument("--prompts", type=int, default=3, help="number of prompts, of which medians are taken")
    parser.add_argument("--folder", type=Path, help="directory on the disk to measure; default: a temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file as well")
    options = parser.parse_args()
    console = Console(highlight=False, width=100)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        setup = Setup(
            shape=SHAPES[options.shape],
            prompt_tokens=options.tokens,
            num_prompts=options.prompts,
            folder=Path(folder),
        )
        try:
            found = rows(setup, measure(setup))
        except (CannotMeasure, ConfigError) as error:
            console.print(str(error), style="red")
            return _EXIT_CANNOT_MEASURE
    report.print_table(console, found)
    if options.json is not None:
        report.write_json(
            options.json, found, about=report.circumstances(["python", "-m", "tandem_bench.tiers", *sys.argv[1:]])
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
