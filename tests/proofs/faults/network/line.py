"""One direction of a connection through the relay: what its honest end sends arrives, or what a fault makes of it."""

import random
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from tandem.values.ids import TransferId
from tests.proofs.faults.network.injector import Injector
from tests.proofs.faults.network.meters import Meter, Part
from tests.proofs.faults.plan import Fault, Kind, Place

_HOLD_S = 0.02
"""How long bytes that are to be overtaken wait for others."""
_RECENT_BYTES = 8192
_MAX_RECORDED_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A message that passed once."""

    connection: object
    index: int
    data: bytes
    head_bytes: int


@dataclass(slots=True, kw_only=True, eq=False)
class Surroundings:
    """What the two lines of a connection and those of all others share."""

    injector: Injector
    transport: str
    long_stall_s: float
    closing: threading.Event = field(default_factory=threading.Event)
    recorded: dict[Place, deque[Recorded]] = field(default_factory=lambda: {p: deque(maxlen=48) for p in Place})


class Line:
    """Used by one thread. `cut(hard)` ends the connection; `may_end` says whether this direction may end by a fault."""

    def __init__(
        self,
        source: socket.socket,
        target: socket.socket,
        meter: Meter,
        place: Place,
        around: Surroundings,
        cut: Callable[[bool], None],
        greeting: Fault | None,
    ) -> None:
        self._source, self._target, self._meter, self._place = source, target, meter, place
        self._around, self._cut = around, cut
        self._greeting = greeting
        self._poller = select.poll()
        self._poller.register(source, select.POLLIN)
        # Descriptors travel beside bytes on Unix sockets.
        self._passes_fds = source.family == socket.AF_UNIX
        self._fds: list[int] = []
        self._skip = 0
        self._recent = b""
        self._held = bytearray()
        self._hold = self._overtake = 0
        self._overtaken_of: TransferId | None = None
        self._has_overtaken = False
        self._inserts: list[bytes] = []
        self._unit = bytearray()
        self._unit_of: tuple[int, int] = (-1, 0)
        self.deaf = False
        """Nothing more arrives, whatever is sent."""

    def run(self) -> None:
        """Until the honest end has ended."""
        with suppress(OSError):
            while (data := self._receive()) is not None:
                for part in self._meter.feed(data):
                    self._pass(part)
            self._send(self._meter.rest())
            self._flush()
        for fd in self._fds:
            socket.close(fd)

    def _receive(self) -> bytes | None:
        while self._held and not self._poller.poll(_HOLD_S * 1000):
            self._flush()
        if not self._passes_fds:
            return self._source.recv(1 << 16) or None
        data, fds, _flags, _address = socket.recv_fds(self._source, 1 << 16, 4)
        self._fds += fds
        return data or None

    def _pass(self, part: Part) -> None:
        self._record(part)
        if part.head and part.index:
            for insert in self._inserts:
                self._emit(insert)
            self._inserts.clear()
        data = part.data
        if part.index == 0 and part.head and self._greeting is not None and self._greeting.place is self._place:
            rng = random.Random(self._greeting.seed)
            at = rng.randrange(len(data))
            self._emit(data[:at])
            data = self._hurt(None, self._greeting.kind, rng, data[at:])
        head_bytes = len(part.data) if part.head else 0
        while (hit := self._around.injector.due(part.owner, self._place, len(data), head_bytes=head_bytes)) is not None:
            at, fault = hit
            self._emit(data[:at])
            data, head_bytes = self._hurt(part.owner, fault.kind, random.Random(fault.seed + 1), data[at:]), 0
        self._emit(data)

    def _record(self, part: Part) -> None:
        if part.head:
            if self._unit:
                index, head_bytes = self._unit_of
                unit = Recorded(connection=self, index=index, data=bytes(self._unit), head_bytes=head_bytes)
                self._around.recorded[self._place].append(unit)
            self._unit, self._unit_of = bytearray(), (part.index, len(part.data))
        if len(self._unit) + len(part.data) <= _MAX_RECORDED_BYTES:
            self._unit += part.data

    def _hurt(self, owner: TransferId | None, kind: Kind, rng: random.Random, data: bytes) -> bytes:
        """Do it in front of `data`; returns what follows."""
        if kind is Kind.REORDER and not self._held:
            self._hold, self._overtake = _some(rng, 2048), _some(rng, 2048)
            self._overtaken_of, self._has_overtaken = owner, False
            return data
        match kind:
            case Kind.FLIP:
                data = flipped(rng, data)
            case Kind.TRUNCATE if self._may_end() and rng.random() < 0.3:
                self._end()
            case Kind.TRUNCATE:
                self._skip += _some(rng, 2048)
            case Kind.REPLAY:
                self._replay(rng)
            case Kind.CUT:
                self._cut(rng.random() < 0.5)
            case _:
                short = rng.random() < 0.75
                self._around.closing.wait(rng.uniform(0.002, 0.04) if short else self._around.long_stall_s)
        self._around.injector.suffered(owner, kind, self._place)
        return data

    def _may_end(self) -> bool:
        """On a Unix socket the end of a writer is the end of its process: nothing in between can pretend it."""
        return not (self._passes_fds and self._place is Place.TO_RECEIVER)

    def _end(self) -> None:
        self._flush()
        self.deaf = True
        with suppress(OSError):
            self._target.shutdown(socket.SHUT_WR)

    def _replay(self, rng: random.Random) -> None:
        if rng.random() < 0.35 and self._recent:
            self._emit(self._recent[-_some(rng, len(self._recent)) :])
            return
        units = list(self._around.recorded[self._place])
        # What another connection sent in this place could be taken for what comes next.
        next_index = self._unit_of[0] + 1
        twins = [unit for unit in units if unit.index == next_index and unit.connection is not self]
        if twins and rng.random() < 0.8:
            units = twins
        if not units:
            self._emit(self._recent)
            return
        unit = rng.choice(units)
        data, how = unit.data, rng.random()
        if how < 0.4:
            data = data[: unit.head_bytes]
        elif how < 0.6:
            data = data[: unit.head_bytes] + flipped(rng, data[unit.head_bytes :])
        self._inserts.append(data)

    def _emit(self, data: bytes) -> None:
        """On its way: past what is lost and what is held back."""
        if self._skip:
            lost = min(self._skip, len(data))
            self._skip -= lost
            data = data[lost:]
        if self._hold and data:
            part = data[: self._hold]
            self._held += part
            self._hold -= len(part)
            data = data[len(part) :]
        if self._held and data:
            ahead = data[: self._overtake]
            self._overtake -= len(ahead)
            self._has_overtaken = True
            self._send(ahead)
            data = data[len(ahead) :]
            if not self._overtake:
                self._flush()
        self._send(data)

    def _flush(self) -> None:
        if self._held:
            held, self._held, self._hold = bytes(self._held), bytearray(), 0
            # With nothing behind it, it was only late.
            kind = Kind.REORDER if self._has_overtaken else Kind.STALL
            self._around.injector.suffered(self._overtaken_of, kind, self._place)
            self._send(held)

    def _send(self, data: bytes) -> None:
        if not data or self.deaf:
            return
        self._recent = (self._recent + data)[-_RECENT_BYTES:]
        view = memoryview(data)
        if self._fds:
            fds, self._fds = self._fds, []
            try:
                view = view[socket.send_fds(self._target, [view], fds) :]
            finally:
                for fd in fds:
                    socket.close(fd)
        self._target.sendall(view)


def flipped(rng: random.Random, data: bytes) -> bytes:
    """`data` with a few bits of its front turned over, mostly one."""
    made = bytearray(data)
    if made:
        for i in range(min(len(made), rng.choice((1, 1, 1, 2, 4)))):
            made[i] ^= 1 << rng.randrange(8) if rng.random() < 0.7 else rng.randint(1, 255)
    return bytes(made)


def _some(rng: random.Random, most: int) -> int:
    """Return a random number up to `most`, small ones more often."""
    return max(1, min(most, int(most ** rng.random())))
