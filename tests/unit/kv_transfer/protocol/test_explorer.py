"""Every interleaving of the real state machines, within bounds; and why each guard is needed."""

from collections.abc import Callable
from typing import Any

import pytest

from kv_transfer.layout.chunk_plan import HandoffSize
from kv_transfer.layout.lanes import Lane
from kv_transfer.protocol import guards
from kv_transfer.protocol.coverage import Coverage
from tests.proofs.explore.explorer import MEETINGS, Explored, explore, foreign_messages_do_nothing
from tests.proofs.explore.lives import Lives
from tests.proofs.explore.model import properties
from tests.proofs.explore.model.environment import Environment
from tests.proofs.explore.model.freeze import freeze, thaw
from tests.proofs.explore.model.scope import Names, Scope
from tests.proofs.explore.pairs import Meeting, Pairs
from tests.proofs.explore.traces import Broken
from tests.proofs.explore.whole import Whole
from tests.proofs.explore.worlds import DAILY, NIGHTLY, World


def _no(*_: Any) -> bool:
    return False


def _yes(*_: Any) -> bool:
    return True


def _sealed(seal: Any, _num_verified: int, _coverage: Any) -> bool:
    return seal is not None


def _world(*only: str, **bounds: Any) -> Scope:
    return Scope(**{"num_layers": 1, "max_faults": 1, **bounds}, only=frozenset(only) or None)


REMOVALS: dict[str, tuple[Callable[..., bool], Scope]] = {
    "stale_attempt": (_no, _world("repeat", "deadline", "refuse to bind", max_attempts=2)),
    "stale_incarnation": (_no, _world()),
    "misdirected": (_no, _world("repeat", "crash", max_faults=2)),
    "superseded": (_no, _world()),
    "unknown_lane": (_no, _world("bend", bent=True)),
    "wrong_grants": (_no, _world("bend", bent=True, num_heads=2)),
    "out_of_range": (_no, _world("bend", bent=True, num_layers=2)),
    "repeated_chunk": (_no, _world("repeat", "damage", max_faults=2, max_rewrites=2)),
    "rewrites_exhausted": (_no, _world("damage", max_faults=2)),
    "repeated_first_token": (_no, _world()),
    "wrong_identity": (_no, _world("computes other tokens", mistakes=True)),
    "complete": (_sealed, _world()),
    "continuable": (_yes, _world()),
    "quiet": (_yes, _world()),
    "drain_is_proof": (_yes, _world(remote=True)),
    "still_live": (_yes, _world()),
    "not_granted": (_no, _world()),
    "stale_nack": (_no, _world("repeat", "damage", max_faults=2, max_rewrites=2)),
    "out_of_time": (_no, _world()),
    "reads_pending": (_no, _world("repeat", "bend", bent=True, max_faults=2)),
    "unsealed_commit": (_no, _world("bend", bent=True)),
    "impossible_fetch": (_no, _world("bend", bent=True, fetch=True)),
    "wrong_binding": (_no, _world("bind too few")),
}

REDUNDANT: dict[str, str] = {
    "unexpected_size": "`out_of_range` and `complete` refuse what it let pass; it says early what is wrong",
    "beyond_seal": "a chunk beyond the seal covers cells of another, which `overlapping` refuses; it bounds a table",
    "overlapping": "against hostile peers; `complete` demands that every cell has landed",
    "altered_chunk": "against hostile peers; `complete` demands that every cell has landed",
    "contradicting_seal": "against hostile peers; the first SEAL stays, with or without it",
    "stale_verdict": "while `repeated_chunk` holds, one verification of a chunk is under way at a time",
}
"""Guards that no exploration misses alone, and what stands behind each."""


SHARED = frozenset({"crash", "hang", "cut", "decode worker crashes"})
SAME = MEETINGS[0]


@pytest.fixture
def show(capsys: pytest.CaptureFixture[str]):
    def print_result(explored: Explored) -> None:
        with capsys.disabled():
            print(f"\n{explored}")

    return print_result


@pytest.mark.parametrize("world", DAILY, ids=str)
@pytest.mark.in_turns
def test_explorer_every_interleaving_is_safe_and_ends(world: World, show) -> None:
    explored = explore(world.scope, *world.meetings)
    show(explored)
    assert explored.num_states > world.at_least


@pytest.mark.slow
@pytest.mark.parametrize("world", NIGHTLY, ids=str)
def test_explorer_larger_worlds_are_safe_and_end(world: World, show) -> None:
    explored = explore(world.scope, *world.meetings)
    show(explored)
    assert explored.num_states > world.at_least


def test_explorer_daily_worlds_cover_a_million_states_with_two_faults() -> None:
    paired = [world for world in DAILY if world.meetings and world.scope.max_faults == 2]
    assert max(world.at_least for world in paired) > 1_000_000
    assert all(world.scope.max_faults <= 2 and world.scope.num_chunks <= 3 for world in DAILY)
    assert {meeting for world in DAILY for meeting in world.meetings} == set(MEETINGS)


# The search itself


@pytest.mark.parametrize("meeting", MEETINGS, ids=str)
@pytest.mark.parametrize(
    "scope",
    [
        Scope(num_layers=1, max_faults=1, shared_memory=False, only=frozenset({"crash"})),
        Scope(num_layers=1, max_faults=0, spare_blocks=1),
        pytest.param(Scope(num_layers=1, max_faults=1, only=frozenset({"hang"})), marks=pytest.mark.slow),
        pytest.param(Scope(num_layers=1, max_faults=1, shared_memory=False, only=SHARED), marks=pytest.mark.slow),
        pytest.param(
            Scope(num_layers=1, max_faults=2, shared_memory=False, only=frozenset({"crash"})), marks=pytest.mark.slow
        ),
    ],
    ids=["crashes", "spare-blocks", "hangs", "shared-faults", "two-crashes"],
)
@pytest.mark.in_turns
def test_explorer_pairs_of_lives_equal_whole_cluster(scope: Scope, meeting: Meeting) -> None:
    lives = Lives(Environment(scope)).explore()
    assert Pairs(lives, meeting).explore() == Whole(Environment(scope), meeting).explore()


def test_explorer_handoffs_never_affect_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = Lives(Environment(Scope(max_faults=1, shared_memory=False))).explore()
    assert foreign_messages_do_nothing(lives.environment.names) > 5_000
    monkeypatch.setattr(guards, "stale_attempt", lambda _envelope, _key: False)
    with pytest.raises(properties.Violation):
        foreign_messages_do_nothing(lives.environment.names)


def test_explorer_early_block_reuse_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the pairwise search alone, with the checks of a single life switched off."""
    for name in ("no_writer_into", "writes_its_own"):
        monkeypatch.setattr(properties, name, lambda *_, **_options: None)
    monkeypatch.setattr("tests.proofs.explore.model.life.Life.put", lambda *_: None)
    monkeypatch.setattr(properties, "right_content", lambda *_, **_options: None)
    monkeypatch.setattr(guards, "quiet", lambda _granted, _proven: True)
    lives = Lives(Environment(Scope(num_layers=1, max_faults=1, only=frozenset({"cut"})))).explore()
    with pytest.raises(Broken, match="reused while a writer may be alive"):
        Pairs(lives, SAME).explore()


def test_explorer_thawed_machine_equals_frozen_one() -> None:
    lives = Lives(Environment(Scope(max_faults=1, only=frozenset({"damage"})))).explore()
    images = lives.environment.names.machines.images.values
    assert len(images) > 50
    for image in images:
        assert freeze(thaw(image)) == image


def test_explorer_lives_are_ordered_by_required_faults() -> None:
    lives = Lives(Environment(Scope(num_layers=1, max_faults=1))).explore()
    assert list(lives.levels) == sorted(lives.levels)
    assert lives.trace(len(lives.nodes) - 1)
    assert Names(scope=lives.environment.scope).fresh_ladder == 0


# Guards


@pytest.mark.parametrize("name", REMOVALS)
def test_explorer_missing_guard_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replacement, scope = REMOVALS[name]
    monkeypatch.setattr(guards, name, replacement)
    with pytest.raises(Broken) as broken:
        explore(scope)
    assert broken.value.trace


WINDOWS = Scope(steps=(2,), num_layers=3, chunk_cells=2, windowed_layers=(0,), max_faults=0)


def test_explorer_wrong_destinations_of_windowed_layers_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    explore(WINDOWS)
    monkeypatch.setattr(Scope, "windows", lambda _self, blocks, _first: (blocks,))
    with pytest.raises(Broken, match="attempt 1 wrote into block"):
        explore(WINDOWS)


def test_explorer_layer_taken_for_another_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where windowed layers are apart, the first of a lane is not the first of the model."""
    monkeypatch.setattr(HandoffSize, "num_computed", lambda _self, num_layers: num_layers)
    with pytest.raises(Broken, match="before it is computed"):
        explore(WINDOWS)


def test_explorer_waiting_for_what_is_not_sent_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_units(_self: Coverage, *, num_units: int, lane: Lane, first_unit: int) -> None:
        del first_unit
        begin(_self, num_units=num_units, lane=lane)

    begin = Coverage.__init__
    monkeypatch.setattr(Coverage, "__init__", all_units)
    with pytest.raises(Broken, match="no request is ever done"):
        explore(WINDOWS)


@pytest.mark.turn(0)
def test_explorer_worlds_with_all_guards_are_safe() -> None:
    for scope in {scope for _replacement, scope in REMOVALS.values()}:
        explore(scope)


def test_explorer_every_guard_is_removed_or_explained() -> None:
    named = {name for name, value in vars(guards).items() if callable(value) and value.__module__ == guards.__name__}
    assert named == set(REMOVALS) | set(REDUNDANT)
    assert not set(REMOVALS) & set(REDUNDANT)


def test_explorer_trace_is_shortest_and_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    replacement, scope = REMOVALS["not_granted"]
    monkeypatch.setattr(guards, "not_granted", replacement)
    with pytest.raises(Broken) as broken:
        explore(scope)
    assert broken.value.trace == [
        "the router names prefill worker p",
        "prefill worker p gets PREFILL of attempt 1 from the decode worker",
        "submit 0 1",
        "prefill worker p computes on",
        "prefill worker p computes on",
    ]


# Identity


@pytest.mark.turn(2)
def test_explorer_attempt_of_other_prompt_keeps_no_blocks() -> None:
    faults = frozenset({"computes other tokens", "crash", "cut"})
    explore(Scope(steps=(1, 1), num_layers=1, max_faults=2, mistakes=True, only=faults))


def test_explorer_tokens_differing_only_in_seal_are_not_kept() -> None:
    faults = frozenset({"goes on with other tokens"})
    explore(Scope(steps=(1, 1), num_layers=1, max_faults=1, mistakes=True, only=faults))


@pytest.mark.turn(1)
def test_explorer_offer_hash_protects_unsealed_attempt() -> None:
    """Identities cannot tell: the engine continues with other tokens than it has named."""
    faults = frozenset({"goes on with other tokens", "crash"})
    with pytest.raises(Broken, match="keeps wrong KV"):
        explore(Scope(steps=(1, 1), num_layers=1, max_faults=2, mistakes=True, only=faults))
