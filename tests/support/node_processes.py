"""Another node of a worker, as tests see it: a process tree of its own, which comes from another loopback address."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from engine.distributed.links.node_group import NodeGroup
from tandem.rpc.hosts import hold

OTHER_HOST = "127.0.0.2"
_STARTER = """
import sys
from engine.distributed.links.node_group import NodeGroup
from engine.distributed.ranks.node_starter import NodeStarter
from tandem.telemetry.logs import configure

configure("info", "node")
group = NodeGroup.from_json(sys.stdin.buffer.read())
sys.exit(NodeStarter(group, int(sys.argv[1]), source=sys.argv[2]).run())
"""


def free_port() -> int:
    """One that nobody has."""
    with hold("127.0.0.1", 0) as held:
        return int(held.getsockname()[1])


def group(size: int = 2, num_nodes: int = 2, **more) -> NodeGroup:
    values = {"host": "127.0.0.1", "port": free_port(), "secret": b"0123456789abcdef", "tls": None, "join_s": 60.0}
    return NodeGroup(size=size, num_nodes=num_nodes, **values | more)


@contextmanager
def another_node(given: NodeGroup, node: int = 1, host: str = OTHER_HOST) -> Iterator["subprocess.Popen[str]"]:
    """Its starter; killed at the end, and its ranks with it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _STARTER, str(node), host],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdin.write(given.to_json().decode())
    process.stdin.close()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
