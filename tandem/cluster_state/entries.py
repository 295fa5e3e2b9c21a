"""Encodes and authenticates the cluster state that workers and routers publish in Redis.

Workers publish their registration, a log of their cache's changes and snapshots of it; routers their load and their
tenants' usage, and which adapters were loaded or unloaded through them.

A value is an HMAC-SHA-256 tag and a protobuf message (tandem/v1/cluster_state.proto). The key is derived from the
cluster's secret; the tag covers the kind of entry, the cluster's name and the whole message, which has the worker's id,
incarnation and sequence number. An attacker who can write to Redis but lacks the secret can therefore only remove
entries or restore old ones, which costs hit rate. A router ignores loads that were written before it started, and loads
that are not newer than the latest one it has seen of the same router. A load that it missed while running counts as
new, for one lease. An entry that is too large, malformed, forged or of another process raises BadEntry.
"""

import hmac
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError, Message

from tandem.adapters.files import MAX_ADAPTER_NAME_CHARS, Adapter, checked_adapter_name
from tandem.protocol.wire import adapter_from_pb, adapter_to_pb
from tandem.v1 import cluster_state_pb2 as pb
from tandem.v1 import session_pb2
from tandem.values.block_hash import HASH_BYTES
from tandem.values.ids import BlockHash, Incarnation, WorkerId
from tandem.values.roles import WorkerRole

MAX_CHANGES = 1024
"""Maximum number of changes in one log entry, which a router applies in one step of its event loop."""
MAX_STATE_NAMES = 1 << 20
MAX_SHARES = 4096
MAX_TALLIES = 4096
MAX_HEARD = 256
"""Maximum number of other routers in a load."""
MAX_ADAPTER_CHANGES = 512
MAX_ADAPTER_PATH_BYTES = 1024
TAG_BYTES = 16
MAX_ID_LENGTH = 128
MAX_ADDRESS_LENGTH = 256
SMALL_BYTES = 1024
"""Size limit of a worker's registration or log head."""
STATE_BYTES = MAX_STATE_NAMES * HASH_BYTES + SMALL_BYTES
CHANGES_BYTES = MAX_CHANGES * (HASH_BYTES + 1) + SMALL_BYTES
_ADAPTER_BYTES = 2 * MAX_ADAPTER_NAME_CHARS + MAX_ADAPTER_PATH_BYTES + 128
LOAD_BYTES = (
    MAX_SHARES * (MAX_ID_LENGTH + 64) + MAX_TALLIES * (TAG_BYTES + 32) + MAX_HEARD * 10
    + MAX_ADAPTER_CHANGES * _ADAPTER_BYTES + SMALL_BYTES
)  # fmt: skip
_MAC_BYTES = 32
_DIGEST = re.compile("[0-9a-f]{64}")
_MAX_COUNT = (1 << 63) - 1
_ROLES = {WorkerRole.PREFILL: session_pb2.WORKER_ROLE_PREFILL, WorkerRole.DECODE: session_pb2.WORKER_ROLE_DECODE}
_ROLE_OF: dict[int, WorkerRole] = {number: role for role, number in _ROLES.items()}
_M = TypeVar("_M", bound=Message)


class BadEntry(Exception):
    """The value is not an authentic entry of this cluster, or belongs under another key; the message says why."""


class Process(NamedTuple):
    """One process of a worker; a restart makes a new one."""

    worker_id: WorkerId
    incarnation: Incarnation

    @property
    def mark(self) -> str:
        """The process as part of a Redis key."""
        return f"{self.worker_id}@{self.incarnation:x}"

    @classmethod
    def parse(cls, mark: str) -> "Process":
        """Parse a `mark`. Raises BadEntry when it is malformed."""
        worker_id, at, incarnation = mark.rpartition("@")
        try:
            number = int(incarnation, 16)
        except ValueError:
            raise BadEntry("no incarnation") from None
        if not at or not 0 < len(worker_id) <= MAX_ID_LENGTH or not 0 < number <= _MAX_COUNT:
            raise BadEntry("no worker")
        return cls(WorkerId(worker_id), Incarnation(number))


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A worker process and the address of its sessions."""

    process: Process
    role: WorkerRole
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """The extent of the entries about a worker's cache."""

    next_sequence: int
    """Sequence number of the next change."""
    state_sequence: int
    """Sequence number of the first change that the snapshot does not include."""
    num_entries: int
    """Number of entries in the log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Consecutive changes of a worker's cache: names of blocks and whether each was stored, else evicted."""

    first_sequence: int
    changes: tuple[tuple[BlockHash, bool], ...]

    @property
    def next_sequence(self) -> int:
        """Number of the change after these."""
        return self.first_sequence + len(self.changes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheState:
    """All blocks that a worker's cache holds at one moment."""

    next_sequence: int
    names: bytes
    """Block names, concatenated; a block comes after its parent."""

    def __len__(self) -> int:
        return len(self.names) // HASH_BYTES

    def slices(self, size: int) -> Iterator[tuple[BlockHash, ...]]:
        """Yield the names, at most `size` at a time."""
        for start in range(0, len(self.names), size * HASH_BYTES):
            yield tuple(_names(self.names[start : start + size * HASH_BYTES]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Load that one router has placed on one worker."""

    process: Process
    report_number: int
    """Number of the worker's latest report that the router has received."""
    backlog_tokens: int
    num_requests: int
    backlog_since: int
    """The part of both that was submitted after that report."""
    num_since: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantTally:
    """A tenant's usage at one router during the current epoch."""

    tenant: bytes
    """Keyed hash of the tenant's name, TAG_BYTES long."""
    epoch: int
    """Number of times that the tenant has returned after an idle period, which resets its counters."""
    requests: int
    tokens: int
    num_inflight: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterChange:
    """The latest change of one adapter's name that was made while the cluster ran."""

    name: str
    version: int
    """Time of the change in Unix milliseconds, later than that of every earlier change of the name."""
    adapter: Adapter | None
    """The adapter that was loaded; None: unloaded."""

    @property
    def order(self) -> tuple[int, str]:
        """Of two changes of one name the one with the greater order counts, on every router."""
        return self.version, "" if self.adapter is None else self.adapter.digest


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoad:
    """The requests that a router has in flight, and its tenants' usage."""

    router: Incarnation
    sequence: int
    shares: tuple[Share, ...]
    tallies: tuple[TenantTally, ...] = ()
    hears: tuple[Incarnation, ...] = ()
    """Incarnations of the other routers whose entries it has seen."""
    adapters: tuple[AdapterChange, ...] = ()
    """Changes of adapters that it knows, its own and others'."""


class ClusterStateCodec:
    """Encodes and verifies the entries of one cluster."""

    def __init__(self, secret: bytes, cluster: str) -> None:
        self._key = hmac.digest(secret, b"tandem board v1", "sha256")
        self._cluster = cluster.encode()

    def seal_notice(self, notice: Notice) -> bytes:
        """Encode the registration of a worker process."""
        role, address = _ROLES[notice.role], notice.address
        return self._seal(b"worker", pb.WorkerRegistration(**_who(notice.process), role=role, address=address))

    def open_notice(self, data: bytes, process: Process) -> Notice:
        """Decode a registration. Raises BadEntry when it is malformed or not authentic."""
        message = self._open(b"worker", data, pb.WorkerRegistration, SMALL_BYTES, process)
        role = _ROLE_OF.get(message.role)
        host, _, port = message.address.rpartition(":")
        if role is None or len(message.address) > MAX_ADDRESS_LENGTH:
            raise BadEntry("no valid role or address")
        if not host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
            raise BadEntry("no valid address")
        return Notice(process=process, role=role, address=message.address)

    def seal_head(self, process: Process, footprint: Footprint) -> bytes:
        """Encode the extent of the entries about a worker's cache."""
        return self._seal(
            b"head",
            pb.CacheLogHead(
                **_who(process),
                next_sequence=footprint.next_sequence,
                state_sequence=footprint.state_sequence,
                num_entries=footprint.num_entries,
            ),
        )

    def open_head(self, data: bytes, process: Process) -> Footprint:
        """Decode a log's extent. Raises BadEntry when it is malformed or not authentic."""
        head = self._open(b"head", data, pb.CacheLogHead, SMALL_BYTES, process)
        _check_counts(head.next_sequence, head.state_sequence)
        return Footprint(
            next_sequence=head.next_sequence, state_sequence=head.state_sequence, num_entries=head.num_entries
        )

    def seal_changes(self, process: Process, changes: Changes) -> bytes:
        """Encode a log entry. Raises ValueError beyond MAX_CHANGES."""
        if not 0 < len(changes.changes) <= MAX_CHANGES:
            raise ValueError(f"a log entry must have 1 to {MAX_CHANGES} changes, got {len(changes.changes)}")
        message = pb.CacheChanges(
            **_who(process),
            first_sequence=changes.first_sequence,
            names=b"".join(name for name, _ in changes.changes),
            stored=bytes(stored for _, stored in changes.changes),
        )
        return self._seal(b"changes", message)

    def open_changes(self, data: bytes, process: Process) -> Changes:
        """Decode a log entry. Raises BadEntry when it is malformed or not authentic."""
        message = self._open(b"changes", data, pb.CacheChanges, CHANGES_BYTES, process)
        _check_counts(message.first_sequence)
        count, names, stored = len(message.stored), message.names, message.stored
        if not 0 < count <= MAX_CHANGES or len(names) != count * HASH_BYTES or stored.strip(b"\0\1"):
            raise BadEntry("names and changes do not match")
        return Changes(
            first_sequence=message.first_sequence,
            changes=tuple(zip(_names(names), map(bool, stored), strict=True)),
        )

    def seal_state(self, process: Process, next_sequence: int, names: Sequence[BlockHash]) -> bytes:
        """Encode a snapshot of a cache, of its first MAX_STATE_NAMES names: parents come before their children."""
        packed = b"".join(names[:MAX_STATE_NAMES])
        return self._seal(b"state", pb.CacheSnapshot(**_who(process), next_sequence=next_sequence, names=packed))

    def open_state(self, data: bytes, process: Process) -> CacheState:
        """Decode a snapshot. Raises BadEntry when it is malformed or not authentic."""
        message = self._open(b"state", data, pb.CacheSnapshot, STATE_BYTES, process)
        _check_counts(message.next_sequence)
        if len(message.names) % HASH_BYTES:
            raise BadEntry("names end with an incomplete name")
        return CacheState(next_sequence=message.next_sequence, names=message.names)

    def seal_load(self, load: RouterLoad) -> bytes:
        """Encode a router's load, at most MAX_SHARES workers of it."""
        shares = [
            pb.RouterLoadShare(
                **_who(share.process),
                report_number=share.report_number,
                backlog_tokens=share.backlog_tokens,
                num_requests=share.num_requests,
                backlog_since=share.backlog_since,
                num_since=share.num_since,
            )
            for share in load.shares[:MAX_SHARES]
        ]
        message = pb.RouterLoad(
            router=load.router,
            sequence=load.sequence,
            shares=shares,
            tallies=tallies_to_pb(load.tallies),
            hears=load.hears[:MAX_HEARD],
            adapters=adapter_changes_to_pb(load.adapters[:MAX_ADAPTER_CHANGES]),
        )
        return self._seal(b"load", message)

    def open_load(self, data: bytes, router: Incarnation) -> RouterLoad:
        """Decode a router's load. Raises BadEntry when it is malformed or not authentic."""
        message = self._parse(b"load", data, pb.RouterLoad, LOAD_BYTES)
        if message.router != router:
            raise BadEntry("entry of another router")
        if len(message.shares) > MAX_SHARES:
            raise BadEntry("too many shares")
        if len(message.hears) > MAX_HEARD:
            raise BadEntry("too many routers")
        return RouterLoad(
            router=router,
            sequence=message.sequence,
            shares=tuple(map(_share, message.shares)),
            tallies=tallies_from_pb(message.tallies),
            hears=tuple(map(Incarnation, message.hears)),
            adapters=adapter_changes_from_pb(message.adapters),
        )

    def _seal(self, kind: bytes, message: Message) -> bytes:
        body = message.SerializeToString()
        return self._mac(kind, body) + body

    def _open(self, kind: bytes, data: bytes, form: type[_M], most_bytes: int, process: Process) -> _M:
        message = self._parse(kind, data, form, most_bytes)
        if (message.worker_id, message.incarnation) != process:  # type: ignore[attr-defined]  # all of these have both
            raise BadEntry("entry of another worker")
        return message

    def _parse(self, kind: bytes, data: bytes, form: type[_M], most_bytes: int) -> _M:
        if not _MAC_BYTES <= len(data) <= most_bytes:
            raise BadEntry(f"size must be {_MAC_BYTES} to {most_bytes} bytes, got {len(data)}")
        body = data[_MAC_BYTES:]
        if not hmac.compare_digest(data[:_MAC_BYTES], self._mac(kind, body)):
            raise BadEntry("wrong HMAC: forged, or of another cluster")
        message = form()
        try:
            message.ParseFromString(body)
        except DecodeError:
            raise BadEntry("malformed") from None
        return message

    def _mac(self, kind: bytes, body: bytes) -> bytes:
        code = hmac.new(self._key, digestmod="sha256")
        for part in (kind, self._cluster, body):
            code.update(len(part).to_bytes(8, "little"))
            code.update(part)
        return code.digest()


def tallies_to_pb(tallies: Sequence[TenantTally]) -> list[pb.TenantTally]:
    """Convert the first MAX_TALLIES tenants."""
    return [pb.TenantTally(**asdict(tally)) for tally in tallies[:MAX_TALLIES]]


def tallies_from_pb(tallies: Sequence[pb.TenantTally]) -> tuple[TenantTally, ...]:
    """Convert tenants' usage. Raises BadEntry when it is out of bounds."""
    if len(tallies) > MAX_TALLIES:
        raise BadEntry("too many tenants")
    for tally in tallies:
        _check_counts(tally.requests, tally.tokens)
        if len(tally.tenant) != TAG_BYTES:
            raise BadEntry("no tenant")
    return tuple(
        TenantTally(tenant=t.tenant, epoch=t.epoch, requests=t.requests, tokens=t.tokens, num_inflight=t.num_inflight)
        for t in tallies
    )


def adapter_changes_to_pb(changes: Iterable[AdapterChange]) -> list[pb.AdapterChange]:
    """Convert changes of adapters."""
    return [
        pb.AdapterChange(
            name=change.name,
            version=change.version,
            adapter=None if change.adapter is None else adapter_to_pb(change.adapter),
        )
        for change in changes
    ]


def adapter_changes_from_pb(changes: Sequence[pb.AdapterChange]) -> tuple[AdapterChange, ...]:
    """Convert changes of adapters. Raises BadEntry when they are too many, or malformed."""
    if len(changes) > MAX_ADAPTER_CHANGES:
        raise BadEntry("too many adapters")
    return tuple(map(_adapter_change, changes))


def _adapter_change(change: pb.AdapterChange) -> AdapterChange:
    _check_counts(change.version)
    try:
        name = checked_adapter_name(change.name)
    except ValueError:
        raise BadEntry("no valid name of an adapter") from None
    if not change.HasField("adapter"):
        return AdapterChange(name=name, version=change.version, adapter=None)
    adapter = adapter_from_pb(change.adapter)
    if adapter.name != name or _DIGEST.fullmatch(adapter.digest) is None:
        raise BadEntry("no valid adapter")
    return AdapterChange(name=name, version=change.version, adapter=adapter)


def _who(process: Process) -> dict[str, Any]:
    return {"worker_id": process.worker_id, "incarnation": process.incarnation}


def _names(packed: bytes) -> Iterable[BlockHash]:
    return (BlockHash(packed[i : i + HASH_BYTES]) for i in range(0, len(packed), HASH_BYTES))


def _share(share: pb.RouterLoadShare) -> Share:
    if not 0 < len(share.worker_id) <= MAX_ID_LENGTH:
        raise BadEntry("no worker")
    _check_counts(share.report_number, share.backlog_tokens, share.backlog_since)
    return Share(
        process=Process(WorkerId(share.worker_id), Incarnation(share.incarnation)),
        report_number=share.report_number,
        backlog_tokens=share.backlog_tokens,
        num_requests=share.num_requests,
        backlog_since=share.backlog_since,
        num_since=share.num_since,
    )


def _check_counts(*counts: int) -> None:
    if max(counts) > _MAX_COUNT:
        raise BadEntry(f"a number must be at most {_MAX_COUNT}, got {max(counts)}")
