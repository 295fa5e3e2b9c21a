"""A prefill worker in a process of its own: `python -m ... TRANSPORT INCARNATION GATE_AFTER_TOKENS`.

Prints its port. It computes GATE_AFTER_TOKENS tokens of each prompt and then waits for a line on stdin.
"""

import asyncio
import sys
from dataclasses import replace

from kv_transfer.transports.catalogue import open_senders
from tests.support.kv_transfer.handoff_fakes import SETTINGS, Pool, prefill_worker


async def main(transport: str, incarnation: int, gate_after_tokens: int) -> None:
    """See the module's docstring."""
    settings = replace(SETTINGS, lease_s=1.0)
    async with prefill_worker(
        lambda region: open_senders(region, choice=transport),
        pool=Pool(64),
        incarnation=incarnation,
        settings=settings,
    ) as worker:
        worker.owner.gate.clear()
        worker.owner.gate_after_tokens = gate_after_tokens
        sys.stdout.write(worker.address.rpartition(":")[2] + "\n")
        sys.stdout.flush()
        while await asyncio.to_thread(sys.stdin.readline):
            worker.owner.gate.set()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
