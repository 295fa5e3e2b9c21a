"""Orders on pins that a slow worker has still to take. Pure.

Only the newest word on a pin matters, so it takes the place of an older one: a pin that is renewed at each use waits
once. Beyond a bound the oldest is dropped, which leaks nothing: workers end pins by their own clocks, and one that is
not renewed is made again when it is next used.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

from tandem.values.prefix_pin import PinKey

OrderT = TypeVar("OrderT")


class PendingPinOrders(Generic[OrderT]):
    def __init__(self, *, most: int) -> None:
        self._most = most
        # Whose newest order came first, first.
        self._orders: dict[PinKey, OrderT] = {}

    def __len__(self) -> int:
        return len(self._orders)

    def put(self, key: PinKey, order: OrderT) -> None:
        """Make it, renew it or end it."""
        self._orders.pop(key, None)
        if len(self._orders) >= self._most:
            del self._orders[next(iter(self._orders))]
        self._orders[key] = order

    def take(self, most: int) -> Iterator[OrderT]:
        """The first ones; they wait no longer."""
        for key in list(islice(self._orders, most)):
            yield self._orders.pop(key)

    def clear(self) -> None:
        """Nobody takes them any more."""
        self._orders.clear()
