"""`python -m tests.proofs.kills --count 200 --seed 1 --transport shm`: kill -9 of workers of a whole cluster, as a
table."""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.proofs.kills.campaign import (
    NUM_CLIENTS,
    PATIENT,
    RANKS_HELP,
    SHAPE,
    Campaign,
    Report,
    Workers,
    private_ranks,
    sizes_of,
)
from tests.proofs.kills.clients import Prompt, known_prompts
from tests.proofs.kills.fork_server import start_fork_servers
from tests.proofs.kills.table import lines
from tests.support.oracle import Oracle
from tests.support.running_cluster import running

NUM_PROMPTS = 12


async def campaign(
    prompts: Sequence[Prompt], *, count: int, seed: int, transport: str, sizes: tuple[int, int], clients: int
) -> Report:
    """Start a cluster, kill, stop it. `sizes`: ranks of a prefill and of a decode worker."""
    shape = SHAPE | {"transfer__transport": transport} | ({} if sizes == (1, 1) else private_ranks(*sizes))
    with tempfile.TemporaryDirectory(prefix="kills-") as name, start_fork_servers(Path(name)) as command:
        async with running(command=command, policy=PATIENT, **shape) as cluster:
            workers = Workers(cluster, Path(name))
            return await Campaign(workers, prompts, seed=seed, num_clients=clients).run(count)


def main() -> int:
    """0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.kills", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="kills that hit a transfer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=("shm", "tcp"), default="shm")
    parser.add_argument(
        "--ranks",
        type=sizes_of,
        default=(1, 1),
        metavar="P:D",
        help=f"{RANKS_HELP}; these are killed, too",
    )
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS, help="requests at any time")
    args = parser.parse_args()
    if args.ranks != (1, 1) and args.transport == "shm":
        parser.error("--ranks needs --transport tcp: memory that nobody else can map does not travel by shm")
    prompts = known_prompts(Oracle(), NUM_PROMPTS, seed=args.seed)
    shape = {"transport": args.transport, "sizes": args.ranks, "clients": args.clients}
    report = asyncio.run(campaign(prompts, count=args.count, seed=args.seed, **shape))
    print(f"{args.transport}, seed {args.seed}:", *lines(report), sep="\n", flush=True)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
