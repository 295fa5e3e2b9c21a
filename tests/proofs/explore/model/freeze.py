"""State machines as values: frozen, interned, and stepped through a cache of their own transitions.

A machine of `kv_transfer` is a pure function (state, input, time) -> (state, actions). So a state can be taken apart
into a hashable value, put together again in a fresh object, and a step that was made once need never run again.

Time: every step runs at time 0, expiry at a time beyond all leases. What a lease still knows at rest is its duration.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

from kv_transfer.protocol.leases import Lease
from kv_transfer.protocol.states import HandoffState

BEYOND_DEADLINE = 1.0
BEYOND_LEASES = 1e6
_ATOMS = (int, float, str, bytes, bool, type(None), tuple, frozenset, Enum)


class Node(tuple[Any, ...]):
    """A frozen object: its type, then its frozen parts."""

    __slots__ = ()


def freeze(value: Any) -> Any:
    """A hashable image of `value`, equal for states that no later input can tell apart."""
    if isinstance(value, _ATOMS):
        return value
    kind = type(value)
    if kind is Lease:
        return Node((Lease, value._duration_s))
    if kind in (list, set):
        return Node((kind, *map(freeze, sorted(value) if kind is set else value)))
    if kind is dict:
        return Node((dict, *((k, freeze(v)) for k, v in sorted(value.items()))))
    if (params := getattr(kind, "__dataclass_params__", None)) is not None and params.frozen:
        return value
    return Node((kind, *(freeze(getattr(value, name)) for name in _names(value))))


def thaw(image: Any) -> Any:
    """A fresh object of which `image` is the frozen image."""
    if type(image) is not Node:
        return image
    kind, parts = image[0], image[1:]
    if kind is Lease:
        return Lease(parts[0], 0.0)
    if kind in (list, set):
        return kind(map(thaw, parts))
    if kind is dict:
        return {k: thaw(v) for k, v in parts}
    value = object.__new__(kind)
    names = _NAMES[kind]
    for name, part in zip(names, parts, strict=True):
        setattr(value, name, thaw(part))
    return value


_NAMES: dict[type, tuple[str, ...]] = {}


def _names(value: Any) -> tuple[str, ...]:
    kind = type(value)
    names = _NAMES.get(kind)
    if names is None:
        names = tuple(getattr(kind, "__slots__", ())) or tuple(sorted(vars(value)))
        _NAMES[kind] = names
    return names


class Interned:
    """Values by number, each once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self.values)

    def number(self, value: Any) -> int:
        """The number of `value`, new or known."""
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Machines:
    """Every machine state met so far, by number, and every step made so far."""

    def __init__(self) -> None:
        self.images = Interned()
        self.states: list[HandoffState | None] = []
        """Where each machine stands; None for a ladder."""
        self._seen: dict[int, Any] = {}
        self._steps: dict[tuple[Any, ...], tuple[int, Any]] = {}

    def add(self, machine: Any) -> int:
        """The number of this machine's state."""
        number = self.images.number(freeze(machine))
        if number == len(self.states):
            self.states.append(getattr(machine, "state", None))
        return number

    def get(self, number: int) -> Any:
        """A fresh machine in that state."""
        return thaw(self.images.values[number])

    def get_cached(self, number: int) -> Any:
        """The machine in that state, to look at only."""
        machine = self._seen.get(number)
        if machine is None:
            machine = self._seen[number] = self.get(number)
        return machine

    def step(self, number: int, key: Any, do: Callable[[Any], Any]) -> tuple[int, Any]:
        """(next state, what `do` returned) of `do` on that machine; `key` names what it does, actor included."""
        found = self._steps.get((number, key))
        if found is None:
            machine = self.get(number)
            result = do(machine)
            found = self._steps[number, key] = (self.add(machine), result)
        return found
