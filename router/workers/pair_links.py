"""Estimates the time that the link of two workers adds to a hand-off, or saves, from measured pairs. Pure.

A hand-off's exposed time is what its transfer takes after the prompt has been computed. Decode workers report it for
every hand-off that was committed; here it is kept in seconds per byte, with exponential decay, for every class of links
(how near the two workers are, and by which transport KV moves), for every receiver in each class, and for the pairs
most recently used.

Placement's transfer time already has the rate at which KV arrives at a decode worker. What is added is how the pair
differs from that worker's usual mix of links: the difference between classes, plus the pair's own difference from what
the receiver sees in its class. The latter counts more the more hand-offs show it, and not at all below a fifth, which
is noise. Where all links are of one class and no pair differs, nothing is added.
"""

from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum
from itertools import islice
from math import exp, inf, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from router.types.worker_view import WorkerInfo, WorkerKey
from router.workers.columns import Bools, Floats, PoolMembers

PRIOR_BYTES_PER_S = {
    "memory": 32e9,
    "cuda_ipc": 64e9,
    "shm": 16e9,
    "nixl": 12e9,
    "torch_dist": 6e9,
    "tcp": 3e9,
    "": 3e9,
}
"""Bytes per second of exposed time by transport, until a class has been measured."""
_PRIOR_OF_UNKNOWN = PRIOR_BYTES_PER_S["tcp"]
BEYOND_RACK = 2.0
"""Factor by which it is slower between two racks."""
HALF_LIFE_S = 120.0
"""Time in which what was measured loses half its weight."""
_DECAY = log(2.0) / HALF_LIFE_S
PRIOR_HANDOFFS = 3.0
"""Weight of what is known beforehand, in hand-offs."""
NOISE_SHARE = 0.2
"""Differences of a pair below this share are ignored."""
MAX_PAIRS = 65_536
"""Pairs remembered; the least recently used is forgotten."""
REFRESH_S = 1.0
"""Time between two uses of new measurements: a hand-off costs no more than noting it."""

MOST_REFRESHED = 1_024
"""Most pairs that are computed each time, of those with new measurements and of those whose differences fade."""

_ON_ONE_HOST = ("memory", "cuda_ipc", "shm")
_BETWEEN_HOSTS = ("nixl", "tcp", "torch_dist")
NO_LINK = 255
"""Class of two workers that cannot pair."""


class Locality(Enum):
    HOST = "host"
    RACK = "rack"
    BEYOND = "beyond"


class LinkClass(NamedTuple):
    """Links that are probably alike."""

    locality: Locality
    transport: str
    """The transport that two workers such as these take; empty: unknown."""

    @property
    def prior_s(self) -> float:
        """Exposed seconds per byte before any was measured."""
        slower = BEYOND_RACK if self.locality is Locality.BEYOND else 1.0
        return slower / PRIOR_BYTES_PER_S.get(self.transport, _PRIOR_OF_UNKNOWN)


def link_class(prefill: WorkerInfo, decode: WorkerInfo) -> LinkClass:
    """Return the class of the link between two workers."""
    return _class_of(_locality(prefill, decode), prefill.transports & decode.transports)


def _class_of(locality: Locality, common: frozenset[str]) -> LinkClass:
    preferred = (*_ON_ONE_HOST, *_BETWEEN_HOSTS) if locality is Locality.HOST else _BETWEEN_HOSTS
    return LinkClass(locality, next((transport for transport in preferred if transport in common), ""))


def _locality(prefill: WorkerInfo, decode: WorkerInfo) -> Locality:
    if _host(prefill) and _host(prefill) == _host(decode):
        return Locality.HOST
    return Locality.RACK if prefill.rack and prefill.rack == decode.rack else Locality.BEYOND


def _host(worker: WorkerInfo) -> str:
    return worker.handoff_address.rpartition(":")[0]


class _Evidence:
    """Exposed seconds and bytes of hand-offs, each of which counts less as it ages."""

    __slots__ = ("at_s", "count", "num_bytes", "seconds")

    def __init__(self) -> None:
        self.at_s = self.count = self.num_bytes = self.seconds = 0.0

    def add(self, num_bytes: float, seconds: float, now_s: float) -> None:
        kept = _kept(now_s - self.at_s)
        self.count = self.count * kept + 1.0
        self.num_bytes = self.num_bytes * kept + num_bytes
        self.seconds = self.seconds * kept + seconds
        self.at_s = now_s

    def weight(self, now_s: float) -> float:
        """Number of hand-offs that count now."""
        return self.count * _kept(now_s - self.at_s)

    def estimate(self, prior: float, now_s: float) -> float:
        """Return seconds per byte, between what was measured and the prior."""
        if not self.num_bytes:
            return prior
        share = self.weight(now_s) / (self.weight(now_s) + PRIOR_HANDOFFS)
        return share * self.seconds / self.num_bytes + (1.0 - share) * prior


def _kept(age_s: float) -> float:
    return exp(-max(0.0, age_s) * _DECAY)


class ClassRate(NamedTuple):
    """Measured rate of one class of links, for metrics."""

    link: LinkClass
    bytes_per_s: float
    """Bytes per second of exposed time."""
    num_handoffs: float
    """Hand-offs that this rests on, aged."""


class PairTable:
    """Measurements of all pairs, whichever workers are live."""

    def __init__(self) -> None:
        self.classes: dict[LinkClass, _Evidence] = {}
        self.receivers: dict[tuple[WorkerKey, LinkClass], _Evidence] = {}
        self.pairs: OrderedDict[tuple[WorkerKey, WorkerKey], _Evidence] = OrderedDict()
        """By prefill and decode worker, the most recently used last."""
        self.changed: dict[tuple[WorkerKey, WorkerKey], None] = {}
        """Pairs measured since placement last used them."""
        self.own_ms: dict[WorkerKey, dict[WorkerKey, float]] = {}
        """By decode and prefill worker: milliseconds per token by which a pair differs from its class; no empty ones.
        By workers and not by their rows, so that it need not be computed again when another one joins or leaves."""
        self.fading: dict[tuple[WorkerKey, WorkerKey], None] = {}
        """The pairs of `own_ms`, the one computed longest ago first."""
        self._partners: dict[WorkerKey, dict[WorkerKey, None]] = {}
        """The other worker of each of a worker's pairs."""

    def observe(
        self, prefill: WorkerInfo, decode: WorkerInfo, *, num_tokens: int, exposed_s: float, now_s: float
    ) -> None:
        """Record a hand-off of so many tokens that was complete `exposed_s` after its prompt had been computed."""
        if num_tokens <= 0 or not 0.0 <= exposed_s < inf:
            return
        link, num_bytes = link_class(prefill, decode), float(num_tokens * decode.kv_bytes_per_token)
        pair = (prefill.key, decode.key)
        for evidence in (
            self.classes.setdefault(link, _Evidence()),
            self.receivers.setdefault((decode.key, link), _Evidence()),
            self.pairs.setdefault(pair, _Evidence()),
        ):
            evidence.add(num_bytes, exposed_s, now_s)
        self.pairs.move_to_end(pair)
        self.changed[pair] = None
        for one, other in (pair, pair[::-1]):
            self._partners.setdefault(one, {})[other] = None
        if len(self.pairs) > MAX_PAIRS:
            self._forget(next(iter(self.pairs)))

    def left(self, key: WorkerKey) -> None:
        """Forget a worker that is gone. O(its pairs)."""
        for other in list(self._partners.get(key, ())):
            for pair in ((key, other), (other, key)):
                if pair in self.pairs:
                    self._forget(pair)
        for receiver in [receiver for receiver in self.receivers if receiver[0] == key]:
            del self.receivers[receiver]

    def differs(self, pair: tuple[WorkerKey, WorkerKey], own_ms: float) -> None:
        """Record by how much a pair differs from its class; zero: not at all."""
        prefill, decode = pair
        self.fading.pop(pair, None)
        if own_ms:
            self.own_ms.setdefault(decode, {})[prefill] = own_ms
            self.fading[pair] = None
        elif own := self.own_ms.get(decode):
            own.pop(prefill, None)
            if not own:
                del self.own_ms[decode]

    def _forget(self, pair: tuple[WorkerKey, WorkerKey]) -> None:
        del self.pairs[pair]
        self.changed.pop(pair, None)
        self.differs(pair, 0.0)
        for one, other in (pair, pair[::-1]):
            partners = self._partners[one]
            del partners[other]
            if not partners:
                del self._partners[one]

    def class_s(self, link: LinkClass, now_s: float) -> float:
        """Return the exposed seconds per byte of a class."""
        evidence = self.classes.get(link)
        return link.prior_s if evidence is None else evidence.estimate(link.prior_s, now_s)

    def rates(self, now_s: float) -> list[ClassRate]:
        """Return what is known of every class that was measured."""
        return [
            ClassRate(
                link=link, bytes_per_s=1.0 / max(1e-18, self.class_s(link, now_s)), num_handoffs=found.weight(now_s)
            )
            for link, found in self.classes.items()
        ]


class PairLinks:
    """The links between the live workers, row by row; a new one is made when a worker joins or leaves."""

    def __init__(self, table: PairTable, decode: PoolMembers, prefill: PoolMembers) -> None:
        self._table = table
        self._decode = decode
        self._prefill = prefill
        self.links: list[LinkClass] = []
        self.class_ids = self._classes()
        """[num_decode, num_prefill]: positions in `links`; `NO_LINK` where the two cannot pair."""
        counts = [(self.class_ids == number).sum(axis=1) for number in range(len(self.links))]
        self._mix: Floats = np.array(counts, dtype=np.float64).reshape(len(counts), len(decode)).T
        self._mix /= np.maximum(1.0, self._mix.sum(axis=1, keepdims=True))
        self.offsets_ms: Floats = np.zeros(self._mix.shape)
        """[num_decode, num_classes]: milliseconds per token that a link of the class adds to the receiver's usual."""
        self.least_ms: Floats = np.zeros(len(decode))
        """[num_decode]: the least milliseconds per token that any link to the worker adds."""
        self.most_ms: Floats = np.zeros(len(decode))
        """[num_decode]: the most that a class of its links adds."""
        self._columns: dict[int, Floats] = {}
        self._refresh_s = -inf

    def refreshed(self, now_s: float) -> bool:
        """Use new measurements if it is time to; return whether any links differ."""
        if now_s >= self._refresh_s + REFRESH_S and self.links:
            if self._table.changed or self._refresh_s == -inf or self._table.own_ms:
                self._refresh(now_s)
            self._refresh_s = now_s
        return len(self.links) > 1 or bool(self._table.own_ms)

    def column(self, row: int) -> Floats:
        """Return the milliseconds per token that each prefill worker's link to a decode worker adds; infinite where
        the two cannot pair."""
        found = self._columns.get(row)
        if found is None:
            ids = np.minimum(self.class_ids[row], len(self.links))
            found = self._columns[row] = np.append(self.offsets_ms[row], np.inf)[ids]
            for prefill, own_ms in self._table.own_ms.get(self._decode.infos[row].key, {}).items():
                if (prefill_row := self._prefill.rows.get(prefill)) is not None:
                    found[prefill_row] += own_ms
        return found

    def _refresh(self, now_s: float) -> None:
        table, decode = self._table, self._decode
        seconds = np.array([table.class_s(link, now_s) for link in self.links])
        weights = self._mix * PRIOR_HANDOFFS
        for (key, link), evidence in table.receivers.items():
            row = decode.rows.get(key)
            if row is not None and link in self.links:
                weights[row, self.links.index(link)] += evidence.weight(now_s)
        usual = (weights * seconds).sum(axis=1) / np.maximum(1e-9, weights.sum(axis=1))
        self.offsets_ms = (seconds[None, :] - usual[:, None]) * decode.kv_token_bytes[:, None] * 1e3
        due = dict.fromkeys((*islice(table.changed, MOST_REFRESHED), *islice(table.fading, MOST_REFRESHED)))
        for pair in due:
            table.changed.pop(pair, None)
            self._refresh_pair(pair, now_s)
        self._columns.clear()
        has_class = self._mix > 0.0
        self.least_ms = np.where(has_class, self.offsets_ms, inf).min(axis=1)
        self.most_ms = np.where(has_class, self.offsets_ms, -inf).max(axis=1)
        for key in table.own_ms:
            if (row := decode.rows.get(key)) is not None:
                self.least_ms[row] = self.column(row).min()
        # Workers without any partner.
        self.least_ms[~has_class.any(axis=1)] = self.most_ms[~has_class.any(axis=1)] = 0.0

    def _refresh_pair(self, pair: tuple[WorkerKey, WorkerKey], now_s: float) -> None:
        """Compute how a pair differs from what its receiver sees in the same class."""
        prefill_row, row = self._prefill.rows.get(pair[0]), self._decode.rows.get(pair[1])
        if prefill_row is None or row is None or (number := int(self.class_ids[row, prefill_row])) == NO_LINK:
            return
        table, link, own_ms = self._table, self.links[number], 0.0
        evidence, receiver = table.pairs.get(pair), table.receivers.get((pair[1], link))
        if evidence is not None and receiver is not None:
            usual_s = receiver.estimate(table.class_s(link, now_s), now_s)
            difference_s = evidence.estimate(usual_s, now_s) - usual_s
            if abs(difference_s) > NOISE_SHARE * usual_s:
                own_ms = difference_s * float(self._decode.kv_token_bytes[row]) * 1e3
        table.differs(pair, own_ms)

    def _classes(self) -> NDArray[np.uint8]:
        """Compute all classes at a time: by host and rack, and once for each two kinds of workers."""
        decode, prefill = self._decode, self._prefill
        ids = np.full((len(decode), len(prefill)), NO_LINK, dtype=np.uint8)
        if not ids.size:
            return ids
        is_host = _are_equal([_host(i) for i in decode.infos], [_host(i) for i in prefill.infos])
        is_rack = _are_equal([i.rack for i in decode.infos], [i.rack for i in prefill.infos]) & ~is_host
        near = {Locality.HOST: is_host, Locality.RACK: is_rack, Locality.BEYOND: ~(is_host | is_rack)}
        for number, example in enumerate(decode.examples):
            able = prefill.compatible_with(example)
            for other, sender in enumerate(prefill.examples):
                alike = (decode.kinds == number)[:, None] & (prefill.kinds == other)[None, :]
                if able is not None:
                    alike &= able[None, :]
                for locality, is_near in near.items():
                    found = alike & is_near
                    if found.any():
                        ids[found] = self._number(_class_of(locality, sender.transports & example.transports))
        return ids

    def _number(self, link: LinkClass) -> int:
        if link not in self.links:
            self.links.append(link)
        return self.links.index(link)


def _are_equal(here: Sequence[str], there: Sequence[str]) -> Bools:
    """Compare all pairs of names; empty ones equal nothing."""
    numbers: dict[str, int] = {"": 0}
    ours = np.array([numbers.setdefault(name, len(numbers)) for name in here])
    theirs = np.array([numbers.setdefault(name, len(numbers)) for name in there])
    equal: Bools = (ours[:, None] == theirs[None, :]) & (ours > 0)[:, None]
    return equal
