"""Orders that a planner's decision becomes, and the protocol of what carries them out. Values only; pure."""

from dataclasses import dataclass
from typing import Protocol

from cluster.planner.values import Action, ActionKind, FleetView, Sizes
from cluster.planner.values import other as other_pool
from tandem.values.roles import WorkerRole


class OrderFailed(Exception):
    """The fleet cannot be queried or changed; the message says why and contains no secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Changes of one decision: first the flips, one after another, then the new sizes."""

    before: Sizes
    flips: tuple[WorkerRole, ...]
    """Pools that gain a worker, one entry per flip."""
    after: Sizes

    @classmethod
    def from_actions(cls, actions: tuple[Action, ...], before: Sizes) -> "Order":
        """Combine all actions of one decision."""
        after, flips = before, list[WorkerRole]()
        for action in actions:
            after = after.changed(action.role, -1 if action.kind is ActionKind.STOP else 1)
            if action.kind is ActionKind.FLIP:
                after = after.changed(other_pool(action.role), -1)
                flips.append(action.role)
        return cls(before=before, flips=tuple(flips), after=after)

    @property
    def flipped(self) -> Sizes:
        """Return the sizes once the flips are done."""
        sizes = self.before
        for role in self.flips:
            sizes = sizes.changed(role, 1).changed(other_pool(role), -1)
        return sizes


class Scaler(Protocol):
    """Knows the fleet's intended sizes, and changes them."""

    can_flip: bool
    """Whether a warm worker can change pools; otherwise a new one replaces it like any other."""

    async def fleet(self) -> FleetView:
        """Return the fleet's intended state now. Raises OrderFailed."""
        ...

    async def carry_out(self, order: Order) -> None:
        """Carry out the order until it is done or sure to happen. Raises OrderFailed, also when part of it is done."""
        ...
