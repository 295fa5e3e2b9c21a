"""Windows of a sequence: blocks of layers that attend to its latest tokens (`engine.kv_cache.window_blocks`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.types.block_table import BlockTable
from tandem.errors import ConfigError
from tandem.values.ids import NO_BLOCK, BlockId
from tandem.values.kv_layout import first_window_block, window_start

WindowSet = tuple[BlockId, ...]
"""One block for each group of windowed layers, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowSpec:
    """How the windowed layers of a model are held. Raises ConfigError for sizes that cannot work."""

    window: int
    """Latest tokens, itself included, that a token attends to in these layers; the greatest where they differ."""
    num_groups: int
    """Blocks of a set."""
    block_size: int
    """Tokens of a block."""
    ahead_tokens: int
    """Most tokens of one sequence that all steps under way compute together."""

    def __post_init__(self) -> None:
        for name in ("window", "num_groups", "block_size", "ahead_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of windows must be at least 1, not {getattr(self, name)}")

    @property
    def most_sets(self) -> int:
        """Sets that a sequence needs at most, wherever in a block its last token is."""
        size = self.block_size
        return 1 - -self.ahead_tokens // size - (1 - self.window) // size

    def first_block(self, num_tokens: int) -> int:
        """First token block whose set a sequence of `num_tokens` tokens keeps; see `KVLayout.first_window_block`."""
        return first_window_block(num_tokens, window=self.window, block_size=self.block_size)

    def prefix_from(self, num_blocks: int) -> int:
        """First token block whose set a prefix of so many full blocks needs."""
        return window_start(num_blocks * self.block_size, window=self.window) // self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Most blocks, of layers of either kind, that a sequence of `num_tokens` tokens holds at once."""
        token_blocks = -(-num_tokens // self.block_size)
        return token_blocks + self.num_groups * min(token_blocks, self.most_sets)

    def max_tokens(self, num_blocks: int) -> int:
        """Tokens of the longest sequence that `num_blocks` blocks can hold."""
        each = 1 + self.num_groups
        token_blocks = min(num_blocks // each, self.most_sets)
        if token_blocks == self.most_sets:
            token_blocks = num_blocks - self.num_groups * self.most_sets
        return token_blocks * self.block_size


class WindowTable:
    """One table for each group of windowed layers; what precedes the window has been given up."""

    __slots__ = ("first", "groups", "kept_ends", "num_credits")

    def __init__(self, num_groups: int, *, first: int = 0) -> None:
        """`first`: token blocks before this one are not held; their entries name no block of the sequence."""
        self.first = first
        self.groups = tuple(BlockTable(BlockId(0) for _ in range(first)) for _ in range(num_groups))
        self.num_credits = 0
        """Sets promised to the sequence and not taken yet."""
        self.kept_ends: tuple[int, ...] = ()
        """Token blocks before which others may part from the sequence: the sets of the windows that end there are worth
        keeping."""

    def __len__(self) -> int:
        """Token blocks so far, those given up included."""
        return len(self.groups[0])

    @property
    def num_held(self) -> int:
        """Sets that the sequence holds."""
        return len(self) - self.first

    def set_at(self, index: int) -> WindowSet:
        """The set of a token block that is held."""
        return tuple(group[index] for group in self.groups)

    def blocks(self, begin: int, end: int) -> tuple[tuple[BlockId, ...], ...]:
        """Blocks of each group for these token blocks; NO_BLOCK for those before the window."""
        missing = (NO_BLOCK,) * max(0, min(self.first, end) - begin)
        return tuple((*missing, *map(BlockId, group.ids[begin + len(missing) : end])) for group in self.groups)

    def append(self, blocks: Sequence[BlockId]) -> None:
        """Add the set of the next token block."""
        for group, block in zip(self.groups, blocks, strict=True):
            group.append(block)

    def give_up_first(self) -> WindowSet:
        """Give up the first set that is held. The entries stay, so that a mirror of a table sees appends only."""
        blocks = self.set_at(self.first)
        self.first += 1
        return blocks

    def held(self) -> Iterator[tuple[int, WindowSet]]:
        """Each token block that is held, with its set."""
        for index in range(self.first, len(self)):
            yield index, self.set_at(index)
