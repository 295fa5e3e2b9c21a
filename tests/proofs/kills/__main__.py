"""`python -m tests.proofs.kills --count 200 --seed 1 --transport shm`: kill -9 of workers of a whole cluster, as a
table."""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.proofs.kills.campaign import PATIENT, SHAPE, Campaign, Report, Workers
from tests.proofs.kills.clients import Prompt, known_prompts
from tests.proofs.kills.fork_server import start_fork_servers
from tests.proofs.kills.table import lines
from tests.support.oracle import Oracle
from tests.support.running_cluster import running

NUM_PROMPTS = 12


async def campaign(prompts: Sequence[Prompt], *, count: int, seed: int, transport: str) -> Report:
    """Start a cluster, kill, stop it."""
    with tempfile.TemporaryDirectory(prefix="kills-") as name, start_fork_servers(Path(name)) as command:
        async with running(command=command, policy=PATIENT, transfer__transport=transport, **SHAPE) as cluster:
            return await Campaign(Workers(cluster, Path(name)), prompts, seed=seed).run(count)


def main() -> int:
    """0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="kills that hit a transfer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=("shm", "tcp"), default="shm")
    args = parser.parse_args()
    prompts = known_prompts(Oracle(), NUM_PROMPTS, seed=args.seed)
    report = asyncio.run(campaign(prompts, count=args.count, seed=args.seed, transport=args.transport))
    print(f"{args.transport}, seed {args.seed}:", *lines(report), sep="\n", flush=True)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
