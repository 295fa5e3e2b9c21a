"""What a planner's decision becomes for whoever carries it out. Values and the protocol; pure."""

from dataclasses import dataclass
from typing import Protocol

from cluster.planner.values import Action, ActionKind, FleetView, Sizes
from cluster.planner.values import other as other_pool
from tandem.values.roles import WorkerRole


class OrderFailed(Exception):
    """The fleet cannot be asked or changed; the message says why, and holds no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One decision's changes. First the flips, one after the other; then the sizes as they shall be."""

    before: Sizes
    flips: tuple[WorkerRole, ...]
    """By the pool that gains."""
    after: Sizes

    @classmethod
    def from_actions(cls, actions: tuple[Action, ...], before: Sizes) -> "Order":
        """All of one decision's actions."""
        after, flips = before, list[WorkerRole]()
        for action in actions:
            after = after.changed(action.role, -1 if action.kind is ActionKind.STOP else 1)
            if action.kind is ActionKind.FLIP:
                after = after.changed(other_pool(action.role), -1)
                flips.append(action.role)
        return cls(before=before, flips=tuple(flips), after=after)

    @property
    def flipped(self) -> Sizes:
        """Once the flips are done."""
        sizes = self.before
        for role in self.flips:
            sizes = sizes.changed(role, 1).changed(other_pool(role), -1)
        return sizes


class Scaler(Protocol):
    """Knows what workers there are meant to be, and changes that."""

    can_flip: bool
    """Whether a warm worker can change pools; else a new one takes its place as any other."""

    async def fleet(self) -> FleetView:
        """As it is meant to be now. Raises OrderFailed."""
        ...

    async def carry_out(self, order: Order) -> None:
        """Returns when it is done, or on its way for good. Raises OrderFailed; some of it may be done then."""
        ...
