"""Which fault is due: called on every thread that part of a transfer passes, and notified of what was done."""

import random
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.values.ids import TransferId
from tests.proofs.faults.plan import Fault, Kind, Place, TransferPlan


@dataclass(slots=True, kw_only=True, eq=False)
class _Victim:
    plan: TransferPlan
    armed: int = 0
    """Which fault is next."""
    passed: int = 0
    live: bool = False
    suffered: Counter[tuple[Kind, Place]] = field(default_factory=Counter)


class Injector:
    """All faults of one batch."""

    def __init__(self, transfers: Sequence[TransferPlan], greetings: Sequence[Fault | None]) -> None:
        self._lock = threading.Lock()
        self._victims = {TransferId(plan.name): _Victim(plan=plan) for plan in transfers}
        self._by_token: dict[bytes, TransferId] = {}
        self._greetings = deque(greetings)
        self.violations: list[str] = []
        """What the faulty parts themselves saw that must not be."""

    def begin(self, transfer_id: TransferId) -> None:
        """It is under way."""
        self._victims[transfer_id].live = True

    def end(self, transfer_id: TransferId) -> None:
        """Nothing of it is left: what happens now does not happen to it."""
        self._victims[transfer_id].live = False

    def granted(self, token: bytes, transfer_id: TransferId) -> None:
        """Bytes that name this token are the transfer's."""
        with self._lock:
            self._by_token[token] = transfer_id

    def owner_of(self, token: bytes) -> TransferId | None:
        """Whose bytes name this token."""
        with self._lock:
            return self._by_token.get(token)

    def alone(self) -> TransferId | None:
        """The one transfer that is under way, if there is one."""
        with self._lock:
            live = [transfer_id for transfer_id, victim in self._victims.items() if victim.live]
        return live[0] if len(live) == 1 else None

    def due(
        self, transfer_id: TransferId | None, place: Place, amount: int = 1, *, head_bytes: int = 0
    ) -> tuple[int, Fault] | None:
        """Of `amount` that passes here: how much of it still passes unharmed, and what happens then.

        `head_bytes`: how many of these bytes, at their front, are a header. Without a fault all of `amount` has passed.
        """
        with self._lock:
            victim = self._victims.get(transfer_id) if transfer_id is not None else None
            if victim is None or not victim.live or victim.armed >= len(victim.plan.faults):
                return None
            fault = victim.plan.faults[victim.armed]
            if fault.place is not place:
                return None
            left = fault.after - victim.passed
            if fault.at_head:
                if not head_bytes:
                    return None
                amount = 1
            if left >= amount:
                victim.passed += amount
                return None
            victim.armed += 1
            victim.passed = 0
            return (random.Random(fault.seed).randrange(head_bytes) if fault.at_head else left), fault

    def greeting(self) -> Fault | None:
        """What happens to the connection that is being made now."""
        with self._lock:
            return self._greetings.popleft() if self._greetings else None

    def suffered(self, transfer_id: TransferId | None, kind: Kind, place: Place) -> None:
        """This has been done: to one transfer, or (None) to all that are under way."""
        with self._lock:
            for victim in self._victims.values():
                if victim.live and transfer_id in (None, TransferId(victim.plan.name)):
                    victim.suffered[kind, place] += 1

    def faults(self, transfer_id: TransferId) -> Counter[tuple[Kind, Place]]:
        """What a transfer has suffered."""
        with self._lock:
            return Counter(self._victims[transfer_id].suffered)
