"""How many of all faulty transfers each transport gets."""

_PERCENT = {"tcp": 35, "shm": 27, "memory": 25, "tls": 10, "torch_dist": 3}
"""Most where most can go wrong; gloo's communicators cost a tenth of a second each."""


def share(transport: str, count: int) -> int:
    """Of `count` in all."""
    return -(-count * _PERCENT[transport] // 100)
