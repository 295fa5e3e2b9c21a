"""`python -m kv_transfer`: compiles the code that moves KV chunks now rather than at a worker's first start."""

import logging
import sys
import time

from kv_transfer.memory.mover import Level, load_mover


def main() -> int:
    """Build the mover and print what it uses; returns 1 when it cannot be built, for the reason that the log gives."""
    logging.basicConfig(format="%(message)s")
    started_s = time.monotonic()
    mover = load_mover()
    if mover is None:
        return 1
    sys.stdout.write(f"KV mover ready in {time.monotonic() - started_s:.1f} s ({Level(mover.level).name.lower()})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
