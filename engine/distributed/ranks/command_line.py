"""The command line of a rank's process, which rank 0 or its node's starter runs.

On rank 0's node it is given its connections (`--control-fd`, and `--pulse-fd` with `--host` in a group that spans
nodes); elsewhere a file by which to reach rank 0 (`--join-fd`: a file with the group and its secret).
"""

import argparse
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.distributed.ranks.follower import ServeRegion

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends, however it ends (prctl(2)); exit if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def run_rank(program: str, load_region_server: "Callable[[], ServeRegion] | None" = None) -> int:
    """Run a rank from its command line. Returns the exit code.

    `program`: module that was started. `load_region_server`: imports what serves the KV region of the rank, over the
    socket `--region-fd` or, from another node, a connection of its own; called late.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description="one rank of a tensor-parallel worker")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--control-fd", type=int, help="a connected socket to rank 0")
    way.add_argument("--join-fd", type=int, help="a file with the group whose rank 0 is on another node")
    parser.add_argument("--pulse-fd", type=int, help="with --control-fd: another such socket")
    parser.add_argument("--region-fd", type=int, help="with --control-fd: another such socket, for this rank's KV")
    parser.add_argument("--host", help="address of this node for the ranks of others")
    parser.add_argument("--rank", type=int, help="with --join-fd: which one this is")
    parser.add_argument("--parent-pid", type=int, required=True, help="process id of the parent")
    args = parser.parse_args()
    die_with_parent(args.parent_pid)
    # Imported late: torch takes seconds to load, during which the process must not outlive its parent.
    from engine.distributed.links.joining import link_from_descriptors
    from engine.distributed.ranks.follower import join_and_serve, serve_rank

    serve_region = None if load_region_server is None else load_region_server()
    if args.join_fd is not None:
        return join_and_serve(args.join_fd, args.rank, source=args.host, serve_region=serve_region)
    on_pool = None
    if serve_region is not None and args.region_fd is not None:
        on_pool = partial(serve_region, socket.socket(fileno=args.region_fd))
    return serve_rank(link_from_descriptors(args.control_fd, args.pulse_fd, args.host), on_pool)


def exit_process(code: int) -> None:
    """End without finalization: torch's threads may still call Python objects, such as the store."""
    sys.stderr.flush()
    os._exit(code)
