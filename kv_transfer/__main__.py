"""`python -m kv_transfer`: compile what moves KV chunks now rather than at a worker's first start."""

import logging
import sys
import time

from kv_transfer.memory.mover import Level, load_mover


def main() -> int:
    """Say what was built and what this processor offers; 1 when nothing can be built here, which the log explains."""
    logging.basicConfig(format="%(message)s")
    started_s = time.monotonic()
    mover = load_mover()
    if mover is None:
        return 1
    sys.stdout.write(f"KV mover ready in {time.monotonic() - started_s:.1f} s ({Level(mover.level).name.lower()})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
