"""`python -m tests.proofs.faults [--count N] [--seed S] [--transport NAME]`, or `--transport NAME --replay
SEED[:INDEX]`.

Prints the table and leaves with 1 when something is wrong, having said which batch it was. The seed decides what is
tried and where it goes wrong, not how threads interleave: replay a batch a few times.
"""

import argparse
import logging
import sys

from tests.proofs.faults.campaign import CampaignReport, campaign, replay
from tests.proofs.faults.plan import TRANSPORTS
from tests.proofs.faults.shares import COUNTED, share


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.faults")
    parser.add_argument("--count", type=int, default=2000, help="hand-offs that are hit, all transports together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--transport", choices=TRANSPORTS)
    parser.add_argument("--replay", metavar="SEED[:INDEX]", help="one batch, or one hand-off of it alone")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    report = CampaignReport()
    if arguments.replay:
        if arguments.transport is None:
            parser.error("--replay needs --transport")
        seed, _, index = arguments.replay.partition(":")
        report.merge(replay(arguments.transport, int(seed), int(index) if index else None))
    else:
        names = (arguments.transport,) if arguments.transport else COUNTED
        for name in names:
            count = arguments.count if arguments.transport else share(name, arguments.count)
            report.merge(campaign(name, count=count, seed=arguments.seed))
    print(report.table())
    for violation in report.violations:
        print(f"VIOLATION: {violation}")
    if report.violations:
        print("replay one with: python -m tests.proofs.faults --transport NAME --replay SEED")
        sys.exit(1)


if __name__ == "__main__":
    main()
