"""`python -m tests.proofs.streams --kills 200 --seed 1`: workers of a whole cluster end under live streams, as a
table."""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.proofs.kills.campaign import PATIENT, RANKS_HELP, Workers, sizes_of
from tests.proofs.kills.fork_server import start_fork_servers
from tests.proofs.streams.campaign import NUM_STREAMS, SHAPE, Campaign, Fault, Report, learn, lines, ranked
from tests.support.oracle import Oracle
from tests.support.running_cluster import running

NUM_KNOWN = 24


async def campaign(oracle: Oracle, faults: dict[Fault, int], *, seed: int, sizes: tuple[int, int]) -> Report:
    """Start a cluster, inject faults, stop it. `sizes`: ranks of a prefill and of a decode worker."""
    shape, num_streams = (SHAPE, NUM_STREAMS) if sizes == (1, 1) else (ranked(*sizes), NUM_STREAMS // 2)
    with tempfile.TemporaryDirectory(prefix="streams-") as name, start_fork_servers(Path(name)) as command:
        async with running(command=command, policy=PATIENT, **shape) as cluster:
            known = await learn(cluster.local.http_url, oracle, NUM_KNOWN, seed=seed)
            workers = Workers(cluster, Path(name))
            return await Campaign(workers, known, seed=seed, num_streams=num_streams).run(faults)


def main() -> int:
    """0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.streams", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--freezes", type=int, default=0)
    parser.add_argument("--thaws", type=int, default=0)
    parser.add_argument("--drains", type=int, default=0)
    parser.add_argument("--rank-kills", type=int, default=0, help="of workers that have several")
    parser.add_argument("--ranks", type=sizes_of, default=(1, 1), metavar="P:D", help=RANKS_HELP)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.rank_kills and 1 in args.ranks:
        parser.error("--rank-kills needs --ranks with several ranks in both pools")
    faults = {Fault.KILL: args.kills, Fault.FREEZE: args.freezes, Fault.THAW: args.thaws, Fault.DRAIN: args.drains}
    faults[Fault.RANK] = args.rank_kills
    report = asyncio.run(campaign(Oracle(), faults, seed=args.seed, sizes=args.ranks))
    print(f"seed {args.seed}:", *lines(report), sep="\n", flush=True)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
