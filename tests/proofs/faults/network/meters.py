"""Whose bytes pass a socket: one direction of a connection cut into the messages that its honest end wrote."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.shm import wire as shm_wire
from kv_transfer.transports.tcp import frames as tcp_frames
from kv_transfer.transports.torch_dist import wire as torch_dist_wire
from tandem.errors import TransferError
from tandem.values.ids import TransferId
from tests.proofs.faults.network.injector import Injector


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some bytes of one message."""

    data: bytes
    owner: TransferId | None
    index: int
    """Of the message on this connection."""
    head: bool
    """Its first bytes, all of its header."""


class Meter(Protocol):
    """Of one direction of one connection; used by one thread."""

    def feed(self, data: bytes) -> Iterator[Part]:
        """What these bytes complete; the front of a header waits for its rest."""

    def rest(self) -> bytes:
        """What still waits when the honest end has ended."""


Measure = Callable[[int, bytes], tuple[TransferId | None, int]]
"""(whose it is, how many bytes follow) of the message with this index and header."""


class UnitMeter:
    """A Meter of messages whose headers tell."""

    def __init__(self, head_bytes: Callable[[int], int], measure: Measure) -> None:
        self._head_bytes, self._measure = head_bytes, measure
        self._index = -1
        self._left = 0
        self._owner: TransferId | None = None
        self._waiting = b""

    def feed(self, data: bytes) -> Iterator[Part]:
        data, self._waiting = self._waiting + data, b""
        while data:
            if self._left:
                body, data = data[: self._left], data[self._left :]
                self._left -= len(body)
                yield Part(data=body, owner=self._owner, index=self._index, head=False)
                continue
            size = self._head_bytes(self._index + 1)
            if len(data) < size:
                self._waiting = data
                return
            head, data = data[:size], data[size:]
            self._index += 1
            try:
                self._owner, self._left = self._measure(self._index, head)
            except TransferError:
                self._owner, self._left = None, 0
            yield Part(data=head, owner=self._owner, index=self._index, head=True)

    def rest(self) -> bytes:
        return self._waiting


class SealedMeter:
    """A Meter of what only its ends can read: all of it is of the one transfer that is under way."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector
        self._index = -1

    def feed(self, data: bytes) -> Iterator[Part]:
        self._index += 1
        yield Part(data=data, owner=self._injector.alone(), index=self._index, head=True)

    def rest(self) -> bytes:
        return b""


def meters_of(transport: str, injector: Injector) -> tuple[Meter, Meter]:
    """Of a new connection: towards the receiver, towards the sender."""
    match transport:
        case "tcp":
            return _tcp(injector)
        case "shm":
            return _claims(injector, one_sided_wire.MESSAGE_BYTES), _claims(injector, shm_wire.REGION_BYTES)
        case "torch_dist":
            return _torch_dist(injector)
        case _:
            return SealedMeter(injector), SealedMeter(injector)


def _tcp(injector: Injector) -> tuple[Meter, Meter]:
    owners: dict[int, TransferId | None] = {}
    seed = 0

    def frame(index: int, head: bytes) -> tuple[TransferId | None, int]:
        nonlocal seed
        header = tcp_frames.unpack_header(head, seed)
        if index == 0:
            seed = tcp_frames.seed_of(header.write_id, header.payload_bytes)
            return None, 0
        owners[header.write_id] = injector.owner_of(header.token)
        return owners[header.write_id], header.payload_bytes

    def answer(index: int, head: bytes) -> tuple[TransferId | None, int]:
        return (owners.get(tcp_frames.unpack_answer(head)[1]) if index else None), 0

    return (
        UnitMeter(lambda _index: tcp_frames.HEADER_BYTES, frame),
        UnitMeter(lambda _index: tcp_frames.ANSWER_BYTES, answer),
    )


def _claims(injector: Injector, first_bytes: int) -> Meter:
    def message(index: int, head: bytes) -> tuple[TransferId | None, int]:
        _kind, token = one_sided_wire.unpack(head[: one_sided_wire.MESSAGE_BYTES])
        return (injector.owner_of(token) if index else None), 0

    return UnitMeter(lambda index: one_sided_wire.MESSAGE_BYTES if index else first_bytes, message)


def _torch_dist(injector: Injector) -> tuple[Meter, Meter]:
    owners: dict[int, TransferId | None] = {}
    blob_head = one_sided_wire.MESSAGE_BYTES + 8

    def header(index: int, head: bytes) -> tuple[TransferId | None, int]:
        if index == 0:
            return None, 0
        seen = torch_dist_wire.unpack_header(head)
        if seen.kind is torch_dist_wire.MessageKind.WRITE:
            owners[seen.number] = injector.owner_of(seen.token)
            return owners[seen.number], 0
        return injector.alone(), 0

    def answer(index: int, head: bytes) -> tuple[TransferId | None, int]:
        if index == 0:
            return None, int.from_bytes(head[-8:-4])
        return owners.get(torch_dist_wire.unpack_answer(head)[1]), 0

    return (
        UnitMeter(lambda index: torch_dist_wire.HEADER_BYTES if index else one_sided_wire.MESSAGE_BYTES, header),
        UnitMeter(lambda index: torch_dist_wire.ANSWER_BYTES if index else blob_head, answer),
    )
