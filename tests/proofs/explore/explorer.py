"""One exploration from start to end, and the line that it prints."""

import time
from dataclasses import dataclass, replace

from tandem.values.ids import TransferId
from tests.proofs.explore.lives import Lives
from tests.proofs.explore.model.environment import Environment
from tests.proofs.explore.model.freeze import Machines, freeze
from tests.proofs.explore.model.life import DONE
from tests.proofs.explore.model.properties import Violation
from tests.proofs.explore.model.scope import Names, Scope
from tests.proofs.explore.pairs import Meeting, Pairs
from tests.proofs.explore.traces import Broken

MEETINGS = (
    Meeting(same_decode=True, same_prefill=True),
    Meeting(same_decode=True, same_prefill=False),
    Meeting(same_decode=False, same_prefill=True),
    Meeting(same_decode=False, same_prefill=False),
)
"""All ways to place two requests on two decode workers and two prefill workers, but for names."""


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
    """Distinct states of the whole cluster with two requests, over all placements explored; 0 for one request alone."""
    seconds: float
    """Of one core."""

    @property
    def num_states(self) -> int:
        """Distinct states in which every property was checked."""
        return max(self.num_lives, self.num_pairs)

    def __str__(self) -> str:
        return (
            f"{self.scope}: {self.num_lives:,} states of one request by {self.num_moves:,} moves "
            f"({self.num_machines:,} of machines), {self.num_pairs:,} of two requests, {self.seconds:.1f} s of one core"
        )


def explore(scope: Scope, *meetings: Meeting) -> Explored:
    """Everything that can happen to one request, then to two for each placement. Raises Broken."""
    started = time.process_time()
    lives = Lives(Environment(scope)).explore()
    if not any(life.request == DONE for life in lives.nodes):
        # A protocol that always gives up would be safe, too.
        raise Broken("no request is ever done", [])
    num_pairs = sum(Pairs(lives, meeting).explore() for meeting in meetings)
    return Explored(
        scope=scope,
        num_lives=len(lives.nodes),
        num_moves=lives.num_moves,
        num_machines=len(lives.environment.names.machines.images),
        num_pairs=num_pairs,
        seconds=time.process_time() - started,
    )


def foreign_messages_do_nothing(names: Names) -> int:
    """Show every message met, under another hand-off's name, to every machine met. Returns how many were shown."""
    machines: Machines = names.machines
    others = [
        replace(envelope, key=replace(envelope.key, transfer_id=TransferId("another")))
        for envelope in names.envelopes.values
    ]
    num_shown = 0
    for image, state in zip(machines.images.values, machines.states, strict=True):
        if state is None:
            continue
        machine = machines.get(machines.images.number(image))
        for message in others:
            if machine.on_message(message, 0.0) != ():
                raise Violation(f"{message} of another hand-off does something to {image}")
            num_shown += 1
        if freeze(machine) != image:
            raise Violation(f"messages of another hand-off change {image}")
    return num_shown
