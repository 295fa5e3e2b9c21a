"""`python -m tests.proofs.streams --kills 200 --seed 1`: workers of a whole cluster end under live streams, as a
table."""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.proofs.kills.campaign import PATIENT, Workers
from tests.proofs.kills.nursery import nursery
from tests.proofs.streams.campaign import SHAPE, Blow, Campaign, Report, learn, lines
from tests.support.oracle import Oracle
from tests.support.running_cluster import running

NUM_KNOWN = 24


async def campaign(oracle: Oracle, blows: dict[Blow, int], *, seed: int) -> Report:
    """Start a cluster, strike, stop it."""
    with tempfile.TemporaryDirectory(prefix="streams-") as name, nursery(Path(name)) as command:
        async with running(command=command, policy=PATIENT, **SHAPE) as cluster:
            known = await learn(cluster.local.http_url, oracle, NUM_KNOWN, seed=seed)
            return await Campaign(Workers(cluster, Path(name)), known, seed=seed).run(blows)


def main() -> int:
    """0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.streams", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--freezes", type=int, default=0)
    parser.add_argument("--thaws", type=int, default=0)
    parser.add_argument("--drains", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    blows = {Blow.KILL: args.kills, Blow.FREEZE: args.freezes, Blow.THAW: args.thaws, Blow.DRAIN: args.drains}
    report = asyncio.run(campaign(Oracle(), blows, seed=args.seed))
    print(f"seed {args.seed}:", *lines(report), sep="\n", flush=True)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
