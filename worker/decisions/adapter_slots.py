"""Which adapters a worker holds, and whose turn it is to get one. Pure.

Requests that need an adapter hold it: while they do, it stays. What nobody holds stays too, until its room is needed;
the least recently used goes first. Whoever needs an adapter that is not here waits, first come first served, and those
that wait for the same one get it together. One adapter is loaded at a time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tandem.errors import ConfigError

Ticket = int
"""Names one request for an adapter."""


@dataclass(slots=True, kw_only=True)
class _Resident:
    slot: int
    num_bytes: int
    num_holds: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPlace:
    """Where an adapter goes that is being loaded."""

    slot: int
    evicted: tuple[int, ...] = field(default=())
    """Slots to be emptied before; `slot` may be among them."""


class AdapterSlots:
    """The slots and bytes of one worker, by whom they are used, and who waits for them."""

    MOST_OVERTAKES = 64
    """How many requests may get the adapters that are to make room for the first in line: without a bound popular
    adapters would never make room for a rare one, and with none a rare one would hold up everybody."""

    def __init__(self, *, capacity_bytes: int, num_slots: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._free_slots = list(reversed(range(num_slots)))
        self._free_bytes = capacity_bytes
        self._residents: dict[str, _Resident] = {}
        """By digest, least recently used first."""
        self._by_slot: dict[int, str] = {}
        self._placed: tuple[str, _Resident] | None = None
        """The adapter that is being copied into its slot."""
        self._waiting: dict[Ticket, str] = {}
        """Digests in the order of arrival."""
        self._leaving: frozenset[str] = frozenset()
        """Those that make room for the first in line once nobody holds them; empty: it does not wait for room."""
        self._overtakes = 0
        """How often one of them was held since."""

    @property
    def residents(self) -> tuple[str, ...]:
        """Digests of the adapters that are loaded."""
        return tuple(self._residents)

    @property
    def held_bytes(self) -> int:
        return self.capacity_bytes - self._free_bytes

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def hold(self, ticket: Ticket, digest: str) -> int | None:
        """Hold an adapter that is loaded: its slot. None: the ticket waits, and `next_load` or `grants` names it."""
        found = self._residents.get(digest)
        is_leaving = digest in self._leaving
        if found is None or (is_leaving and self._overtakes >= self.MOST_OVERTAKES):
            self._waiting[ticket] = digest
            return None
        self._overtakes += is_leaving
        return self._held(digest, found)

    def release(self, slot: int) -> None:
        """End one hold of the adapter in this slot."""
        digest = self._by_slot[slot]
        self._residents[digest].num_holds -= 1
        self._touch(digest)

    def withdraw(self, ticket: Ticket) -> None:
        """Wait no longer; unknown tickets are ignored."""
        self._waiting.pop(ticket, None)

    def is_wanted(self, digest: str) -> bool:
        """Whether anybody waits for this adapter."""
        return digest in self._waiting.values()

    def next_load(self) -> str | None:
        """The adapter to be read next: that of the first in line. None: nobody waits for one that is not here."""
        first = next(iter(self._waiting.values()), None)
        return None if first in self._residents else first

    def place(self, digest: str, num_bytes: int) -> AdapterPlace | None:
        """Make room for an adapter that was read. None: too much is held; ask again after the next `release`.

        Raises ConfigError when it would not fit even alone.
        """
        if num_bytes > self.capacity_bytes:
            raise ConfigError(f"it takes {num_bytes} bytes, engine.adapter_bytes leaves {self.capacity_bytes} to all")
        victims = self._victims(num_bytes, self._unheld())
        if victims is None:
            if not self._leaving:
                fewest = sorted(self._residents, key=lambda digest: self._residents[digest].num_holds)
                self._leaving = frozenset(self._victims(num_bytes, fewest) or ())
            return None
        self._stop_waiting_for_room()
        evicted = tuple(self._evict(victim) for victim in victims)
        self._free_bytes -= num_bytes
        placed = _Resident(slot=self._free_slots.pop(), num_bytes=num_bytes)
        self._placed = digest, placed
        return AdapterPlace(slot=placed.slot, evicted=evicted)

    def loaded(self) -> None:
        """What was placed is in its slot."""
        if self._placed is not None:
            digest, resident = self._placed
            self._residents[digest], self._by_slot[resident.slot] = resident, digest
            self._placed = None

    def give_up(self, digest: str) -> tuple[Ticket, ...]:
        """An adapter could not be loaded: its room is free, and these tickets wait no longer."""
        self._stop_waiting_for_room()
        if self._placed is not None:
            _, resident = self._placed
            self._free(resident)
            self._placed = None
        failed = tuple(ticket for ticket, wanted in self._waiting.items() if wanted == digest)
        for ticket in failed:
            del self._waiting[ticket]
        return failed

    def grants(self) -> Iterator[tuple[Ticket, int]]:
        """Yield the tickets whose adapter is here now, with its slot: they hold it from then on."""
        for ticket, digest in list(self._waiting.items()):
            if (found := self._residents.get(digest)) is not None:
                del self._waiting[ticket]
                yield ticket, self._held(digest, found)

    def _held(self, digest: str, resident: _Resident) -> int:
        resident.num_holds += 1
        self._touch(digest)
        return resident.slot

    def _touch(self, digest: str) -> None:
        self._residents[digest] = self._residents.pop(digest)

    def _unheld(self) -> list[str]:
        return [digest for digest, resident in self._residents.items() if not resident.num_holds]

    def _victims(self, num_bytes: int, candidates: Iterable[str]) -> list[str] | None:
        """The first of the candidates whose room is enough for one of this size; None where that of all is not."""
        num_slots, free_bytes = len(self._free_slots), self._free_bytes
        victims = []
        for digest in candidates:
            if num_slots and free_bytes >= num_bytes:
                break
            victims.append(digest)
            num_slots, free_bytes = num_slots + 1, free_bytes + self._residents[digest].num_bytes
        return victims if num_slots and free_bytes >= num_bytes else None

    def _stop_waiting_for_room(self) -> None:
        self._leaving, self._overtakes = frozenset(), 0

    def _evict(self, digest: str) -> int:
        resident = self._residents.pop(digest)
        del self._by_slot[resident.slot]
        self._free(resident)
        return resident.slot

    def _free(self, resident: _Resident) -> None:
        self._free_slots.append(resident.slot)
        self._free_bytes += resident.num_bytes
