"""A cached chain's names: what fits, and what is accepted from the wire."""

import pytest

from tandem.errors import InvalidRequest
from tandem.protocol.chain_wire import chains_from_pb, chains_to_pb
from tandem.v1 import session_pb2 as pb
from tandem.values.cached_chain import MAX_CHAIN_NAMES, CachedChain, fitting
from tandem.values.ids import BlockHash


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


ROOT = name(0)
LONG = CachedChain(after=ROOT, from_root=True, names=(name(1), name(2), name(3)))
BRANCH = CachedChain(after=name(2), from_root=False, names=(name(4), name(5)))
OTHER = CachedChain(after=ROOT, from_root=True, names=(name(6),))


@pytest.mark.parametrize(
    ("room", "lengths"), [(0, []), (1, [1]), (3, [3]), (4, [3, 1]), (5, [3, 2]), (6, [3, 2, 1]), (99, [3, 2, 1])]
)
def test_cached_chain_selects_hottest_within_limit(room: int, lengths: list[int]) -> None:
    taken = fitting((LONG, BRANCH, OTHER), room)
    assert [len(chain.names) for chain in taken] == lengths
    assert all(one.names == whole.names[: len(one.names)] for one, whole in zip(taken, (LONG, BRANCH, OTHER)))  # noqa: B905


def test_cached_chain_selection_includes_parents() -> None:
    taken = fitting((LONG, BRANCH, OTHER), 5)
    assert chains_from_pb(chains_to_pb(taken)) == taken


def test_cached_chain_wire_round_trips() -> None:
    assert chains_from_pb(chains_to_pb((LONG, BRANCH, OTHER))) == (LONG, BRANCH, OTHER)


@pytest.mark.parametrize(
    "bad",
    [
        [pb.CachedChain(after=ROOT, from_root=True, names=b"")],
        [pb.CachedChain(after=ROOT, from_root=True, names=name(1) + b"x")],
        [pb.CachedChain(after=b"short", from_root=True, names=name(1))],
        [pb.CachedChain(after=name(9), from_root=False, names=name(1))],
        [pb.CachedChain(after=ROOT, from_root=True, names=name(1) + name(1))],
        [pb.CachedChain(after=ROOT, from_root=True, names=name(1))] * 2,
        [pb.CachedChain(after=ROOT, from_root=True, names=b"".join(map(name, range(1, MAX_CHAIN_NAMES + 2))))],
    ],
)
def test_cached_chain_wire_malformed_is_refused(bad: list[pb.CachedChain]) -> None:
    with pytest.raises(InvalidRequest):
        chains_from_pb(bad)
