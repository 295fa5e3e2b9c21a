"""`python -m engine.ranks --control-fd N --parent-pid P`: one rank of a worker; only rank 0 starts it."""

import argparse
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when rank 0 ends, however it ends (prctl(2)); at once if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def main() -> int:
    """The command line of a rank, down to its exit code."""
    parser = argparse.ArgumentParser(prog="engine.ranks", description="one rank of a tensor-parallel worker")
    parser.add_argument("--control-fd", type=int, required=True, help="a connected socket to rank 0")
    parser.add_argument("--parent-pid", type=int, required=True, help="process id of rank 0")
    args = parser.parse_args()
    die_with_parent(args.parent_pid)
    # Not before: torch takes seconds to load, and nobody is to outlive rank 0 in them.
    from engine.ranks.follower import serve_rank

    return serve_rank(args.control_fd)


if __name__ == "__main__":
    sys.exit(main())
