"""Entries in Redis survive a round trip, and nothing else is accepted as one."""

import hmac
from pathlib import Path
from random import Random

import pytest

from tandem.adapters.files import Adapter
from tandem.cluster_state.entries import (
    MAX_ADAPTER_CHANGES,
    MAX_CHANGES,
    MAX_HEARD,
    MAX_SHARES,
    MAX_TALLIES,
    SMALL_BYTES,
    TAG_BYTES,
    AdapterChange,
    BadEntry,
    Changes,
    ClusterStateCodec,
    Footprint,
    Notice,
    Process,
    RouterLoad,
    Share,
    TenantTally,
)
from tandem.v1 import cluster_state_pb2 as pb
from tandem.v1 import common_pb2
from tandem.values.ids import BlockHash, Incarnation, WorkerId
from tandem.values.roles import WorkerRole
from tests.support.router.adapters import adapter_of

SECRET = b"a secret of the cluster"
CODEC = ClusterStateCodec(SECRET, "c")
ME = Process(WorkerId("decode-0"), Incarnation(7))
OTHER = Process(WorkerId("decode-0"), Incarnation(8))
NAMES = [BlockHash(i.to_bytes(16, "big")) for i in range(100)]
NOTICE = Notice(process=ME, role=WorkerRole.DECODE, address="10.0.0.1:7000")
FOOTPRINT = Footprint(next_sequence=9, state_sequence=4, num_entries=2)
CHANGES = Changes(first_sequence=5, changes=((NAMES[0], True), (NAMES[1], False)))
SHARE = Share(process=ME, report_number=3, backlog_tokens=100, num_requests=2, backlog_since=40, num_since=1)
TALLY = TenantTally(tenant=bytes(TAG_BYTES), epoch=2, requests=3, tokens=400, num_inflight=1)
LOAD = RouterLoad(router=Incarnation(99), sequence=4, shares=(SHARE,), tallies=(TALLY,), hears=(Incarnation(98),))


def test_entries_round_trip() -> None:
    assert CODEC.open_notice(CODEC.seal_notice(NOTICE), ME) == NOTICE
    assert CODEC.open_head(CODEC.seal_head(ME, FOOTPRINT), ME) == FOOTPRINT
    assert CODEC.open_changes(CODEC.seal_changes(ME, CHANGES), ME) == CHANGES
    assert CODEC.open_load(CODEC.seal_load(LOAD), LOAD.router) == LOAD
    state = CODEC.open_state(CODEC.seal_state(ME, 12, NAMES), ME)
    assert (state.next_sequence, len(state)) == (12, 100)
    assert [name for part in state.slices(33) for name in part] == NAMES


def openers(codec: ClusterStateCodec, process: Process):
    return (
        (CODEC.seal_notice(NOTICE), lambda data: codec.open_notice(data, process)),
        (CODEC.seal_head(ME, FOOTPRINT), lambda data: codec.open_head(data, process)),
        (CODEC.seal_changes(ME, CHANGES), lambda data: codec.open_changes(data, process)),
        (CODEC.seal_state(ME, 3, NAMES), lambda data: codec.open_state(data, process)),
    )


@pytest.mark.parametrize(
    "codec", [ClusterStateCodec(b"another secret of it", "c"), ClusterStateCodec(SECRET, "another")]
)
def test_entry_of_other_cluster_is_refused(codec: ClusterStateCodec) -> None:
    for data, open_ in openers(codec, ME):
        with pytest.raises(BadEntry, match="forged"):
            open_(data)


def test_entry_of_other_process_or_kind_is_refused() -> None:
    for data, open_ in openers(CODEC, OTHER):
        with pytest.raises(BadEntry, match="another worker"):
            open_(data)
    with pytest.raises(BadEntry, match="forged"):
        CODEC.open_changes(CODEC.seal_state(ME, 3, NAMES[:1]), ME)
    with pytest.raises(BadEntry, match="another router"):
        CODEC.open_load(CODEC.seal_load(LOAD), Incarnation(1))


def test_entry_changed_or_truncated_is_refused() -> None:
    rng = Random(5)
    for data, open_ in openers(CODEC, ME):
        for _ in range(40):
            damaged = bytearray(data)
            damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            with pytest.raises(BadEntry):
                open_(bytes(damaged))
            with pytest.raises(BadEntry):
                open_(data[: rng.randrange(len(data))])
        with pytest.raises(BadEntry):
            open_(rng.randbytes(rng.randrange(2 * SMALL_BYTES)))


def sealed(kind: bytes, body: bytes) -> bytes:
    """An owner of the secret may still send invalid entries."""
    key = hmac.digest(SECRET, b"tandem board v1", "sha256")
    parts = b"".join(len(part).to_bytes(8, "little") + part for part in (kind, b"c", body))
    return hmac.digest(key, parts, "sha256") + body


@pytest.mark.parametrize(
    "wrong",
    [
        {"names": NAMES[0], "stored": b""},
        {"names": NAMES[0], "stored": b"\1\1"},
        {"names": NAMES[0], "stored": b"\2"},
        {"names": NAMES[0][:15], "stored": b"\1"},
        {"names": NAMES[0] * (MAX_CHANGES + 1), "stored": b"\1" * (MAX_CHANGES + 1)},
        {"names": NAMES[0], "stored": b"\1", "first_sequence": 1 << 63},
    ],
)
def test_log_entry_out_of_bounds_is_refused(wrong: dict[str, object]) -> None:
    body = pb.CacheChanges(worker_id=ME.worker_id, incarnation=ME.incarnation, **wrong).SerializeToString()
    with pytest.raises(BadEntry):
        CODEC.open_changes(sealed(b"changes", body), ME)


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": 2},
        {"role": 9, "address": "h:1"},
        {"role": 2, "address": "h:0"},
        {"role": 2, "address": "x" * 300 + ":1"},
    ],
)
def test_registration_without_role_or_address_is_refused(wrong: dict[str, object]) -> None:
    body = pb.WorkerRegistration(worker_id=ME.worker_id, incarnation=ME.incarnation, **wrong).SerializeToString()
    with pytest.raises(BadEntry):
        CODEC.open_notice(sealed(b"worker", body), ME)


def test_entry_malformed_or_too_large_is_refused() -> None:
    with pytest.raises(BadEntry, match="malformed"):
        CODEC.open_head(sealed(b"head", b"\xff\xff\xff"), ME)
    shares = [pb.RouterLoadShare(worker_id="w", incarnation=1)] * (MAX_SHARES + 1)
    with pytest.raises(BadEntry, match="shares"):
        CODEC.open_load(sealed(b"load", pb.RouterLoad(router=99, shares=shares).SerializeToString()), Incarnation(99))
    nobody = pb.RouterLoad(router=99, shares=[pb.RouterLoadShare(incarnation=1)]).SerializeToString()
    with pytest.raises(BadEntry, match="no worker"):
        CODEC.open_load(sealed(b"load", nobody), Incarnation(99))
    for tallies, message in (
        ([pb.TenantTally()] * (MAX_TALLIES + 1), "too many"),
        ([pb.TenantTally(tenant=b"x")], "no ten"),
    ):
        with pytest.raises(BadEntry, match=message):
            CODEC.open_load(sealed(b"load", pb.RouterLoad(router=99, tallies=tallies).SerializeToString()), LOAD.router)


def test_load_with_changes_of_adapters_is_read_as_written() -> None:
    changes = (
        AdapterChange(name="team/sql", version=1_700_000_000_000, adapter=adapter_of("team/sql")),
        AdapterChange(name="legal", version=1_700_000_000_001, adapter=None),
    )
    load = RouterLoad(router=LOAD.router, sequence=1, shares=(), adapters=changes)
    assert CODEC.open_load(CODEC.seal_load(load), LOAD.router) == load
    longest = Adapter(name="n" * 128, path=Path("/" + "p" * 1000), digest="0" * 64, num_bytes=1 << 40)
    many = (AdapterChange(name=longest.name, version=1 << 62, adapter=longest),) * MAX_ADAPTER_CHANGES
    sealed_load = CODEC.seal_load(RouterLoad(router=LOAD.router, sequence=1, shares=(), adapters=many))
    assert len(CODEC.open_load(sealed_load, LOAD.router).adapters) == MAX_ADAPTER_CHANGES


@pytest.mark.parametrize(
    "change",
    [
        pb.AdapterChange(name="", version=1),
        pb.AdapterChange(name="s q l", version=1),
        pb.AdapterChange(name="sql", version=1 << 63),
        pb.AdapterChange(name="sql", version=1, adapter=common_pb2.Adapter(name="other", digest="0" * 64)),
        pb.AdapterChange(name="sql", version=1, adapter=common_pb2.Adapter(name="sql", digest="0")),
    ],
)
def test_load_with_an_impossible_adapter_is_refused(change: pb.AdapterChange) -> None:
    message = pb.RouterLoad(router=99, adapters=[change])
    with pytest.raises(BadEntry):
        CODEC.open_load(sealed(b"load", message.SerializeToString()), Incarnation(99))


def test_entry_is_cut_to_its_limits() -> None:
    with pytest.raises(ValueError, match="changes"):
        CODEC.seal_changes(ME, Changes(first_sequence=0, changes=((NAMES[0], True),) * (MAX_CHANGES + 1)))
    many = RouterLoad(router=LOAD.router, sequence=1, shares=(SHARE,) * (MAX_SHARES + 5))
    assert len(CODEC.open_load(CODEC.seal_load(many), LOAD.router).shares) == MAX_SHARES
    many = RouterLoad(router=LOAD.router, sequence=1, shares=(), tallies=(TALLY,) * (MAX_TALLIES + 5))
    assert len(CODEC.open_load(CODEC.seal_load(many), LOAD.router).tallies) == MAX_TALLIES
    many = RouterLoad(router=LOAD.router, sequence=1, shares=(), hears=(Incarnation(5),) * (MAX_HEARD + 5))
    assert len(CODEC.open_load(CODEC.seal_load(many), LOAD.router).hears) == MAX_HEARD
    too_many = pb.RouterLoad(router=99, hears=[5] * (MAX_HEARD + 1)).SerializeToString()
    with pytest.raises(BadEntry, match="too many routers"):
        CODEC.open_load(sealed(b"load", too_many), LOAD.router)


@pytest.mark.parametrize("mark", ["", "w", "@1", "w@", "w@x", "w@0", f"w@{1 << 63:x}", "w" * 200 + "@1"])
def test_process_mark_malformed_is_refused(mark: str) -> None:
    with pytest.raises(BadEntry):
        Process.parse(mark)


def test_process_mark_round_trips() -> None:
    odd = Process(WorkerId("a@b"), Incarnation((1 << 63) - 1))
    assert Process.parse(odd.mark) == odd
