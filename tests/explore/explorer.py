"""One exploration from start to end, and the line that it prints."""

from dataclasses import dataclass

from tests.explore.environment import Environment
from tests.explore.lives import Lives
from tests.explore.pairs import Pairs, Sharing
from tests.explore.scope import Scope

SHARINGS = (
    Sharing(decode_worker=True, prefill_worker=True),
    Sharing(decode_worker=True, prefill_worker=False),
    Sharing(decode_worker=False, prefill_worker=True),
)
"""Two requests that share nothing tell no more than one request does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explored:
    """What an exploration came to."""

    scope: Scope
    num_lives: int
    """Distinct states of everything that belongs to one request."""
    num_moves: int
    num_machines: int
    """Distinct states of receivers, senders and ladders."""
    num_pairs: int
    """Distinct states of the whole cluster with two requests; 0 where one request was explored."""

    @property
    def num_states(self) -> int:
        """Distinct states in which every property was checked."""
        return max(self.num_lives, self.num_pairs)

    def __str__(self) -> str:
        scope = self.scope
        return (
            f"{scope.num_chunks} chunks, {scope.max_faults} faults, {scope.max_attempts} attempts, "
            f"{'shm' if scope.shared_memory else 'tcp'}: {self.num_lives:,} lives by {self.num_moves:,} moves "
            f"({self.num_machines:,} machine states), {self.num_pairs:,} pairs of lives"
        )


def explore(scope: Scope, *sharings: Sharing) -> Explored:
    """Everything that can happen to one request, then to two for each way of sharing workers. Raises Broken."""
    lives = Lives(Environment(scope)).explore()
    return Explored(
        scope=scope,
        num_lives=len(lives.nodes),
        num_moves=lives.num_moves,
        num_machines=len(lives.environment.names.machines.images),
        num_pairs=sum(Pairs(lives, sharing).explore() for sharing in sharings),
    )
