"""How many of all faulty transfers each transport gets: most where most can go wrong.

torch_dist gets none: a few times in a thousand faulty hand-offs gloo's own thread ends the whole process ("received
data size doesn't match expected size") after a communicator broke, and no exception tells Python. It runs when named.
"""

_PERCENT = {"memory": 25, "shm": 28, "tcp": 37, "tls": 10}
COUNTED = tuple(_PERCENT)
NIGHTLY_COUNT = 100_000


def share(transport: str, count: int) -> int:
    """Of `count` in all."""
    return -(-count * _PERCENT[transport] // 100)
