"""Every interleaving of the real state machines, within bounds; and what each guard is for."""

import pytest

from kv_transfer import guards
from tests.explore.environment import Environment
from tests.explore.explorer import SHARINGS, explore
from tests.explore.freeze import freeze, thaw
from tests.explore.lives import Lives
from tests.explore.removals import REMOVALS
from tests.explore.scope import Names, Scope
from tests.explore.traces import Broken

SHM, TCP = True, False


def test_two_requests_and_two_faults_in_every_order(capsys: pytest.CaptureFixture[str]) -> None:
    num_states = 0
    for shared_memory in (SHM, TCP):
        explored = explore(Scope(num_chunks=1, max_attempts=1, shared_memory=shared_memory), SHARINGS[0])
        num_states += explored.num_states
        with capsys.disabled():
            print(f"\n{explored}")
    assert num_states > 1_000_000


@pytest.mark.parametrize("shared_memory", [SHM, TCP])
def test_two_requests_of_two_chunks_share_workers_in_every_way(
    shared_memory: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    explored = explore(
        Scope(num_chunks=2, max_faults=1, max_attempts=1, shared_memory=shared_memory), *SHARINGS[: 1 + shared_memory]
    )
    with capsys.disabled():
        print(f"\n{explored}")
    assert explored.num_pairs > 1_000_000


@pytest.mark.parametrize(
    "scope",
    [
        Scope(num_chunks=3, max_faults=1, max_attempts=1, shared_memory=TCP),
        Scope(num_chunks=1, max_faults=1, max_attempts=2, shared_memory=SHM),
        Scope(num_chunks=1, max_faults=1, max_attempts=2, shared_memory=TCP),
        Scope(num_chunks=1, max_faults=2, max_attempts=1, remote=True),
        Scope(num_chunks=2, max_faults=1, max_attempts=1, bent=True),
    ],
    ids=["three-chunks", "reroutes-shm", "reroutes-tcp", "late-proofs", "forged-messages"],
)
def test_one_request_in_every_order(scope: Scope, capsys: pytest.CaptureFixture[str]) -> None:
    explored = explore(scope)
    with capsys.disabled():
        print(f"\n{explored}")
    assert explored.num_lives > 20_000


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [SHM, TCP])
@pytest.mark.parametrize(
    ("num_chunks", "max_faults", "max_attempts", "paired"),
    [(1, 2, 1, True), (2, 1, 1, True), (3, 1, 1, False), (1, 3, 1, False), (2, 2, 1, False), (2, 1, 2, False)],
)
def test_larger_worlds(
    num_chunks: int,
    max_faults: int,
    max_attempts: int,
    paired: bool,
    shared_memory: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scope = Scope(num_chunks=num_chunks, max_faults=max_faults, max_attempts=max_attempts, shared_memory=shared_memory)
    explored = explore(scope, *(SHARINGS if paired else ()))
    with capsys.disabled():
        print(f"\n{explored}")
    assert explored.num_states > 80_000


@pytest.mark.parametrize("name", REMOVALS)
def test_a_missing_guard_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replacement, scope = REMOVALS[name]
    monkeypatch.setattr(guards, name, replacement)
    with pytest.raises(Broken) as broken:
        explore(scope)
    assert broken.value.trace


def test_the_worlds_of_the_missing_guards_are_whole_with_them() -> None:
    for scope in {scope for _replacement, scope in REMOVALS.values()}:
        explore(scope)


def test_blocks_of_another_prompt_are_not_kept() -> None:
    faults = frozenset({"computes other tokens"})
    explore(Scope(num_chunks=3, max_faults=1, max_attempts=1, other_tokens=True, only=faults))


@pytest.mark.xfail(strict=True, raises=Broken, reason="the identity of landed blocks is only known with SEAL")
def test_an_attempt_that_fails_before_its_seal_keeps_no_blocks_of_another_prompt() -> None:
    faults = frozenset({"computes other tokens", "crash"})
    explore(Scope(num_chunks=2, max_faults=2, max_attempts=1, other_tokens=True, only=faults))


def test_a_thawed_machine_is_the_frozen_one() -> None:
    lives = Lives(Environment(Scope(num_chunks=2, max_faults=1, max_attempts=1, only=frozenset({"damage"})))).explore()
    images = lives.environment.names.machines.images.values
    assert len(images) > 50
    for image in images:
        assert freeze(thaw(image)) == image


def test_a_trace_is_the_shortest_and_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    replacement, scope = REMOVALS["not_granted"]
    monkeypatch.setattr(guards, "not_granted", replacement)
    with pytest.raises(Broken) as broken:
        explore(scope)
    assert broken.value.trace == [
        "prefill worker p gets PREFILL of attempt 1 from the decode worker",
        "submit 0 1",
        "prefill worker p makes an engine step",
        "prefill worker p makes an engine step",
    ]


def test_lives_are_numbered_by_the_faults_they_need() -> None:
    lives = Lives(Environment(Scope(num_chunks=1, max_faults=1, max_attempts=1))).explore()
    assert lives.levels == sorted(lives.levels)
    assert lives.trace(len(lives.nodes) - 1)
    assert Names(scope=lives.environment.scope).fresh_ladder == 0
