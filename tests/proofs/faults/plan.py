"""What goes wrong, and with what: everything that a seed decides before a batch of transfers begins."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kv_transfer.layout.mapping import vector_bytes
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.tcp import frames as tcp_frames
from kv_transfer.transports.torch_dist import wire as torch_dist_wire
from tandem.values.kv_layout import KVLayout


class Kind(StrEnum):
    """What is done to bytes, to writes or to messages on their way."""

    FLIP = "flip"
    TRUNCATE = "truncate"
    """Some are lost, or all from there on."""
    REORDER = "reorder"
    REPLAY = "replay"
    STALL = "stall"
    CUT = "cut"


class Place(StrEnum):
    """Where in a hand-off a fault is injected."""

    TO_RECEIVER = "to receiver"
    """Bytes of a socket of the transport: frames, claims, headers."""
    TO_SENDER = "to sender"
    """Bytes of the same socket the other way: answers."""
    ORDERS = "writes"
    """Whole writes, at the Protocol, and the memory that they went to."""
    ASKING = "asking"
    """Messages of the hand-off protocol from the decode worker. Bits are not flipped there, nor in TELLING: gRPC's
    frames travel over TCP between processes of one cluster, whose checksums protect them, or in TLS; what a message
    of any other content does is for the hostile tests and the explorer."""
    TELLING = "telling"
    """Messages from the prefill worker."""


SOCKETS = (Place.TO_RECEIVER, Place.TO_SENDER)
MESSAGES = (Place.ASKING, Place.TELLING)
WEIGHTS: dict[str, dict[Place, int]] = {
    "memory": {Place.ORDERS: 60, Place.ASKING: 16, Place.TELLING: 24},
    "shm": {Place.ORDERS: 45, Place.TO_RECEIVER: 14, Place.TO_SENDER: 13, Place.ASKING: 12, Place.TELLING: 16},
    "tcp": {Place.ORDERS: 10, Place.TO_RECEIVER: 50, Place.TO_SENDER: 12, Place.ASKING: 12, Place.TELLING: 16},
    "tls": {Place.TO_RECEIVER: 55, Place.TO_SENDER: 20, Place.ASKING: 10, Place.TELLING: 15},
    "torch_dist": {Place.ORDERS: 20, Place.TO_RECEIVER: 30, Place.TO_SENDER: 20, Place.ASKING: 12, Place.TELLING: 18},
}
"""`tls` is the transport `tcp` in TLS."""
TRANSPORTS = tuple(WEIGHTS)
ONE_SIDED = ("memory", "shm")
IN_REGIONS = ("memory", "tcp", "tls")
"""Transports that also go between pools in one region per rank. Of shm each region would have to be mapped apart."""
_CONVERSIONS = (
    ("bfloat16", "int8", "bfloat16"),
    ("bfloat16", "fp8_e4m3", "bfloat16"),
    ("bfloat16", "int8", "int8"),
    ("float32", "fp8_e4m3", "fp8_e4m3"),
    ("float32", "float32", "int8"),
    ("int8", "int8", "bfloat16"),
    ("bfloat16", "int4", "int4"),
    ("int4", "int4", "bfloat16"),
)
"""(source, wire, destination)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that goes wrong with one transfer, once."""

    kind: Kind
    place: Place
    after: int
    """How many of the transfer's own bytes, writes or messages pass unharmed at that place since the last fault."""
    at_head: bool
    """Bytes only: within a header, of which `after` pass unharmed."""
    seed: int
    """Of what else there is to decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferPlan:
    """Shape of one hand-off and the faults that are injected into it."""

    name: str
    seed: int
    num_tokens: int
    held_tokens: int
    step_tokens: int
    """Computed at once."""
    by_layers: bool
    starts_s: float
    cancel_s: float | None
    """How long after its start nobody wants it any more."""
    faults: tuple[Fault, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """Two workers and the hand-offs between them."""

    transport: str
    seed: int
    source: KVLayout
    destination: KVLayout
    wire_dtype: str
    chunk_bytes: int
    write_window: int
    streams: int
    one_at_a_time: bool
    """Where bytes on a socket do not tell whose they are."""
    greetings: tuple[Fault | None, ...]
    """Of each connection in turn, in its first message."""
    transfers: tuple[TransferPlan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Focus:
    """Only these faults, for who looks for something certain."""

    kinds: Sequence[Kind] = tuple(Kind)
    places: Sequence[Place] = tuple(Place)
    greetings: float = 0.0
    """Share of connections that are hit while they are made."""
    heads: float | None = None
    """Share of socket faults that hit a header; None for the usual."""


def plan_batch(transport: str, seed: int, focus: Focus | None = None) -> BatchPlan:
    """The batch of this seed."""
    rng = random.Random(f"{transport}/{seed}")
    source, destination, wire = _layouts(rng, transport)
    source, destination = _with_windows(random.Random(f"windows/{transport}/{seed}"), source, destination)
    if transport in IN_REGIONS:
        # Drawn apart, so that everything else is what the same seed gave before.
        regions = random.Random(f"regions/{transport}/{seed}")
        source, destination = (replace(kv, num_regions=regions.choice((1, kv.tp_size))) for kv in (source, destination))
    chunk_tokens = rng.choice((4, 8, 16, 64))
    vectors = 2 * source.num_kv_heads * source.num_layers
    token_bytes = vectors * vector_bytes(wire, source.head_dim)
    chunk_bytes = max(1, chunk_tokens * token_bytes // rng.choice((1, 1, source.num_layers)))
    drawer = _Drawer(rng, transport, focus or Focus(), token_bytes=token_bytes, chunk_bytes=chunk_bytes)
    transfers = tuple(_transfer(rng, index, destination, drawer) for index in range(rng.randint(3, 8)))
    often = 0.15 if focus is None else focus.greetings
    greetings = tuple(drawer.greeting() if rng.random() < often else None for _ in range(8))
    return BatchPlan(
        transport=transport,
        seed=seed,
        source=source,
        destination=destination,
        wire_dtype=wire,
        chunk_bytes=chunk_bytes,
        write_window=rng.randint(1, 4),
        streams=rng.choice((1, 2, 2, 3)),
        one_at_a_time=transport == "tls",
        greetings=greetings,
        transfers=transfers,
    )


def _layouts(rng: random.Random, transport: str) -> tuple[KVLayout, KVLayout, str]:
    if rng.random() < 0.6:
        here = wire = there = rng.choice(("float32", "bfloat16"))
    else:
        here, wire, there = rng.choice(_CONVERSIONS)
    if transport in ONE_SIDED:
        wire = there
    small, factor = rng.choice((2, 4, 8)), rng.choice((1, 1, 2, 4))
    sizes = [small, small * factor]
    rng.shuffle(sizes)
    heads, layers, head_dim = rng.choice((1, 2, 4)), rng.randint(1, 4), rng.choice((4, 8, 8, 16, 64))

    def layout(dtype: str, block_size: int) -> KVLayout:
        return KVLayout(
            model_fingerprint="m",
            dtype=dtype,
            num_layers=layers,
            num_kv_heads=heads,
            head_dim=head_dim,
            block_size=block_size,
            tp_size=rng.choice((1, 1, 2, 4)),
        )

    return layout(here, sizes[0]), layout(there, sizes[1]), wire


def _with_windows(rng: random.Random, source: KVLayout, destination: KVLayout) -> tuple[KVLayout, KVLayout]:
    """Both, in some batches, with windowed layers kept apart; drawn apart, so that the others stay what they were."""
    if source.num_layers == 1 or rng.random() > 0.3:
        return source, destination
    windowed = tuple(sorted(rng.sample(range(source.num_layers), rng.randrange(1, source.num_layers))))
    apart = replace(source, windowed_layers=windowed, window=rng.choice((1, 5, 12, 30)))
    return apart, replace(destination, windowed_layers=windowed, window=apart.window, block_size=source.block_size)


def _transfer(rng: random.Random, index: int, destination: KVLayout, drawer: "_Drawer") -> TransferPlan:
    held_tokens = destination.block_size * rng.choice((0, 0, 0, 1, 2))
    num_new = rng.randint(1, 48)
    return TransferPlan(
        name=f"t{index}",
        seed=rng.getrandbits(32),
        num_tokens=held_tokens + num_new,
        held_tokens=held_tokens,
        step_tokens=rng.choice((4, 8, 16, 64)),
        by_layers=rng.random() < 0.4,
        starts_s=rng.choice((0.0, 0.0, rng.uniform(0.0, 0.05))),
        cancel_s=rng.uniform(0.0, 0.06) if rng.random() < 0.08 else None,
        faults=tuple(drawer.fault(num_new) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))),
    )


class _Drawer:
    """Draws faults for the transfers of one batch."""

    def __init__(self, rng: random.Random, transport: str, focus: Focus, *, token_bytes: int, chunk_bytes: int) -> None:
        self._rng, self._transport, self._focus = rng, transport, focus
        self._token_bytes, self._chunk_bytes = token_bytes, chunk_bytes
        self._places = {place: w for place, w in WEIGHTS[transport].items() if place in focus.places}

    def fault(self, num_tokens: int) -> Fault:
        """Of a transfer of so many tokens."""
        rng = self._rng
        [place] = rng.choices(list(self._places), list(self._places.values()))
        kinds = [kind for kind in self._focus.kinds if self._possible(kind, place)]
        # A cut hits all that share the connection.
        [kind] = rng.choices(kinds, [1 if kind is Kind.CUT else 3 for kind in kinds])
        heads = self._focus.heads if self._focus.heads is not None else 0.3
        at_head = place in SOCKETS and self._transport != "tls" and rng.random() < heads
        num_bytes = num_tokens * self._token_bytes
        return Fault(
            kind=kind,
            place=place,
            after=rng.randrange(self._extent(place, num_bytes, at_head)),
            at_head=at_head,
            seed=rng.getrandbits(32),
        )

    def greeting(self) -> Fault:
        """Of a connection that is being made."""
        place = self._rng.choice(SOCKETS)
        return Fault(
            kind=self._rng.choice(self._focus.kinds), place=place, after=0, at_head=True, seed=self._rng.getrandbits(32)
        )

    def _possible(self, kind: Kind, place: Place) -> bool:
        if kind is not Kind.FLIP:
            return True
        # Who takes bytes in checks them as they come: what happens to its memory afterwards is no transport's affair.
        return place not in MESSAGES and (place is not Place.ORDERS or self._transport in ONE_SIDED)

    def _extent(self, place: Place, num_bytes: int, at_head: bool) -> int:
        """About how much of a transfer passes there."""
        chunks = -(-num_bytes // self._chunk_bytes)
        if place is Place.ASKING:
            return 3
        if place is Place.TELLING:
            return chunks + 3
        if place is Place.ORDERS or at_head:
            return min(chunks, 3)
        if self._transport == "shm":
            return 2 * one_sided_wire.MESSAGE_BYTES
        if self._transport == "torch_dist":
            unit = torch_dist_wire.HEADER_BYTES if place is Place.TO_RECEIVER else torch_dist_wire.ANSWER_BYTES
            return chunks * unit
        if place is Place.TO_SENDER:
            return chunks * tcp_frames.ANSWER_BYTES
        return num_bytes + chunks * tcp_frames.HEADER_BYTES
