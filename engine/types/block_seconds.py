"""How many blocks a request held, and for how long: what its place in the pool costs. Pure."""


class BlockSeconds:
    """The sum over time of blocks held, told of every change with the time at which it was."""

    __slots__ = ("_num_blocks", "_since_s", "_total")

    def __init__(self) -> None:
        self._num_blocks = 0
        self._since_s = 0.0
        self._total = 0.0

    def change(self, num_blocks: int, now_s: float) -> None:
        """From now on so many are held."""
        if self._num_blocks:
            self._total += self._num_blocks * (now_s - self._since_s)
        self._num_blocks, self._since_s = num_blocks, now_s

    def until(self, now_s: float) -> float:
        """Block-seconds so far."""
        return self._total + self._num_blocks * (now_s - self._since_s)
