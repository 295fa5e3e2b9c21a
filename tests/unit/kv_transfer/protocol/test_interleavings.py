"""Random interleavings of whole hand-offs with loss, repetition, reordering, damage, freezes, crashes and cancels."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer.protocol import guards
from tandem.errors import InvariantError
from tests.support.kv_transfer.world import World


def run(choices: "list[int] | random.Random", *, steps: int, shared_memory: bool, max_faults: int) -> World:
    """Each choice picks a move; one in eight is a fault while any are left."""
    world = World(num_transfers=2, shared_memory=shared_memory, max_faults=max_faults)
    for step in range(steps):
        choice = choices.randrange(2**16) if isinstance(choices, random.Random) else choices[step]
        moves = (world.faults() if choice % 8 == 7 else []) or world.moves()
        moves[choice // 8 % len(moves)]()
    world.settle()
    return world


@given(choices=st.lists(st.integers(0, 2**16 - 1), max_size=120), shared_memory=st.booleans(), faults=st.integers(0, 4))
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_interleavings_of_any_faults_are_safe_and_end(choices: list[int], shared_memory: bool, faults: int) -> None:
    run(choices, steps=len(choices), shared_memory=shared_memory, max_faults=faults)


@pytest.mark.parametrize("shared_memory", [False, True])
def test_random_walks_are_safe_and_end(shared_memory: bool) -> None:
    committed = 0
    for seed in range(400):
        world = run(random.Random(seed), steps=150, shared_memory=shared_memory, max_faults=seed % 6)
        committed += len(world.committed)
    assert committed > 200, "the walks must also get somewhere"


@pytest.mark.parametrize("shared_memory", [False, True])
def test_interleavings_without_faults_commit(shared_memory: bool) -> None:
    for seed in range(30):
        world = run(random.Random(seed), steps=0, shared_memory=shared_memory, max_faults=0)
        assert len(world.committed) == 2


REMOVED = {
    "quiet": lambda granted, proven_quiet: True,
    "complete": lambda seal, num_verified, coverage: seal is not None,
    "continuable": lambda first_token, resume: True,
    "still_live": lambda state: True,
    "repeated_first_token": lambda known, resume: False,
    "not_granted": lambda grant: False,
}


@pytest.mark.parametrize("name", REMOVED)
def test_random_walks_missing_guard_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, name, REMOVED[name])
    with pytest.raises((AssertionError, InvariantError)):
        walk_all()


def walk_all() -> None:
    for seed in range(600):
        run(random.Random(seed), steps=150, shared_memory=bool(seed % 2), max_faults=seed % 6)
