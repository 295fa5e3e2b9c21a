"""The retry ladder's decisions, and the ledger that placement uses, without I/O."""

from collections.abc import Callable
from random import Random

import pytest
from msgspec.structs import replace

from router.dispatch.choices.retry import (
    ChoiceProgress,
    RetryBudget,
    RetryReason,
    TokenGap,
    final_error,
    in_clients_field,
)
from router.placement.costs import CostModel
from router.placement.placer import Placer
from router.types.session_events import (
    AttemptFinished,
    AttemptReader,
    AttemptStarted,
    PrefillRoute,
    SubmitOrder,
    TokensArrived,
)
from router.types.worker_view import PrefixChange, WorkerKey, WorkerLoad
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry, WorkerRejected
from tandem.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestTooLarge,
    ServingError,
    StreamTaken,
    Unavailable,
)
from tandem.values.block_hash import BlockHasher, root_hash
from tandem.values.ids import BlockHash, Incarnation, RequestId, WorkerId
from tandem.values.outputs import FinishReason, PhaseTimes, SampledToken
from tests.support.router.worker_views import worker


def _progress(clock: Callable[[], float] = lambda: 0.0, **changes: int) -> ChoiceProgress:
    return ChoiceProgress(
        prompt_length=20,
        max_tokens=changes.get("max_tokens", 10),
        max_attempts=changes.get("max_attempts", 3),
        clock=clock,
    )


def _arrived(first: int, *tokens: int, cached: int | None = None) -> TokensArrived:
    started = None if cached is None else AttemptStarted(cached_tokens=cached, times=PhaseTimes(prefill_s=2.0))
    return TokensArrived(first_index=first, tokens=tuple(SampledToken(token_id=t) for t in tokens), started=started)


def _ids(tokens: object) -> list[int]:
    return [t.token_id for t in tokens]  # type: ignore[attr-defined]


def test_progress_repeated_tokens_are_accepted_once() -> None:
    progress = _progress()
    assert _ids(progress.accept(_arrived(0, 5, 6))) == [5, 6]
    assert _ids(progress.accept(_arrived(0, 5, 6))) == []
    assert _ids(progress.accept(_arrived(1, 6, 7))) == [7]
    with pytest.raises(TokenGap):
        progress.accept(_arrived(4, 9))
    assert progress.token_ids == [5, 6, 7]


def test_progress_refused_attempt_was_not_taken() -> None:
    progress, budget = _progress(), RetryBudget()
    assert not progress.was_taken
    progress.begin_attempt()
    assert progress.was_taken
    progress.record_failure(RetryReason.REFUSED, Unavailable("x"), budget)
    assert not progress.was_taken
    progress.begin_attempt()
    progress.record_full_worker(WorkerKey(WorkerId("d0"), Incarnation(1)), Overloaded("x"))
    assert not progress.was_taken
    progress.begin_attempt()
    progress.record_failure(RetryReason.WORKER_LOST, Unavailable("x"), budget)
    assert progress.was_taken


def test_progress_bounds_consecutive_failures() -> None:
    progress, budget, error = _progress(), RetryBudget(), Unavailable("x")
    key = WorkerKey(WorkerId("d0"), Incarnation(1))
    assert progress.record_failure(RetryReason.REFUSED, error, budget)
    assert progress.record_failure(RetryReason.REFUSED, error, budget)
    progress.excluded[key] = _Port()
    progress.accept(_arrived(0, 1))
    assert progress.excluded == {}
    assert progress.record_failure(RetryReason.REFUSED, error, budget)
    assert progress.record_failure(RetryReason.REFUSED, error, budget)
    assert not progress.record_failure(RetryReason.REFUSED, error, budget)


@pytest.mark.parametrize(
    ("error", "retried"),
    [
        (Overloaded("x"), True),
        (Unavailable("x"), True),
        (InternalError("x"), True),
        (Cancelled("x"), True),
        (StreamTaken("x"), False),
        (RequestTooLarge("x"), True),
        (InvalidRequest("x"), False),
        (DeadlineExceeded("x"), False),
    ],
)
def test_progress_final_errors_are_not_retried(error: ServingError, retried: bool) -> None:
    assert _progress().record_failure(RetryReason.REFUSED, error, RetryBudget()) is retried


def test_retry_budget_excludes_streams_of_lost_workers() -> None:
    budget, error = RetryBudget(share=0.25, most=2.0), Unavailable("x")
    assert [_progress().record_failure(RetryReason.REFUSED, error, budget) for _ in range(3)] == [True, True, False]
    assert _progress().record_failure(RetryReason.WORKER_LOST, error, budget)
    for _ in range(4):
        budget.earn()
    assert [_progress().record_failure(RetryReason.WORKER_FAULT, error, budget) for _ in range(2)] == [True, False]


def test_failure_that_ends_the_choice_spends_no_retry() -> None:
    budget = RetryBudget(most=1.0)
    assert not _progress().record_failure(RetryReason.REFUSED, InvalidRequest("x"), budget)
    assert not _progress(max_attempts=1).record_failure(RetryReason.REFUSED, Unavailable("x"), budget)
    assert _progress().record_failure(RetryReason.REFUSED, Unavailable("x"), budget)


def test_reroutes_are_bounded_per_attempt_and_by_the_budget() -> None:
    progress, budget = _progress(), RetryBudget(most=3.0)
    progress.begin_attempt()
    assert [progress.try_reroute(budget) for _ in range(3)] == [True, True, False]
    assert progress.begin_attempt() == 2
    assert [progress.try_reroute(budget) for _ in range(2)] == [True, False], "the refused one has spent nothing"


def test_progress_cached_tokens_are_those_of_first_attempt() -> None:
    end = AttemptFinished(reason=FinishReason.STOP, cached_tokens=40, times=PhaseTimes(decode_s=1.0))
    assert _progress().finish(end).cached_tokens == 20
    progress = _progress()
    progress.begin_attempt()
    progress.accept(_arrived(0, 1, cached=4))
    assert progress.record_failure(RetryReason.WORKER_LOST, Unavailable("lost"), RetryBudget())
    progress.begin_attempt()
    progress.accept(_arrived(1, 2, cached=18))
    finish = progress.finish(end)
    assert (finish.cached_tokens, finish.times) == (4, PhaseTimes(prefill_s=2.0, decode_s=1.0))


def test_progress_finished_by_router_has_known_figures() -> None:
    now_s = 10.0
    progress = _progress(lambda: now_s)
    now_s = 10.5
    progress.begin_attempt(kv_bytes_per_token=4)
    now_s = 13.0
    progress.accept(_arrived(0, 1, 2, cached=4))
    now_s = 16.0
    early = progress.finish_early(FinishReason.STOP)
    held = (20 + 1) * 4 * 3.0
    assert early.times == PhaseTimes(router_queue_s=0.5, prefill_s=2.0, decode_s=3.0, kv_byte_s=held)
    assert (early.cached_tokens, early.computed_tokens, early.needed_tokens) == (4, 18, 18)


def test_progress_with_full_output_is_complete_without_end() -> None:
    progress = _progress(max_tokens=2)
    progress.accept(_arrived(0, 1))
    assert not progress.is_complete
    progress.accept(_arrived(1, 1))
    assert progress.is_complete


def test_final_error_is_workers_own_or_generic() -> None:
    assert final_error(None, retry_after_s=1.5).retry_after_s == 1.5
    assert final_error(Unavailable("x"), retry_after_s=1.5).retry_after_s == 1.5
    assert final_error(Overloaded("x", retry_after_s=9.0), retry_after_s=1.5).retry_after_s == 9.0
    for inner in (InternalError("secret detail"), Cancelled("secret detail")):
        error = final_error(inner, retry_after_s=1.5)
        assert isinstance(error, InternalError)
        assert "secret" not in error.message
    refused = RequestTooLarge("too large")
    assert final_error(refused, retry_after_s=1.5) is refused


class _Port:
    def submit(self, order: SubmitOrder, reader: AttemptReader) -> None: ...
    def reroute(self, request_id: RequestId, attempt: int, prefill: PrefillRoute | None) -> None: ...
    def cancel(self, request_id: RequestId, attempt: int) -> None: ...
    def adopt(self, request_id: RequestId, attempt: int, *, num_shown: int, reader: AttemptReader) -> None: ...


class _Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def registry() -> WorkerRegistry:
    registry = WorkerRegistry(prefix_map=PrefixMap(), clock=_Clock())
    for name in ("d0", "p0", "p1"):
        registry.joined(worker(name).info, _Port())
        registry.prefix_changed(worker(name).info.key, PrefixChange(first_sequence=0, snapshot=True, changes=()))
    return registry


def _placer(registry: WorkerRegistry) -> Placer:
    return Placer(registry=registry, model=CostModel(), rng=Random(0), clock=_Clock())


def _names(count: int) -> list[BlockHash]:
    names: list[BlockHash] = []
    BlockHasher(b"s").extend(root_hash(secret=b"s", model_fingerprint="m"), names, range(count * 16))
    return names


def _books(registry: WorkerRegistry) -> dict[str, tuple[int, int]]:
    return {str(w.info.key.worker_id): (w.backlog_tokens, w.num_active) for w in registry.snapshots()}


def test_ledger_follows_an_assignment(registry: WorkerRegistry) -> None:
    placer = _placer(registry)
    assignment = placer.assign(num_tokens=320, names=_names(20))
    computing = str(assignment.computing.worker_id)
    assert _books(registry) == {"d0": (0, 1), "p0": (0, 0), "p1": (0, 0)} | {computing: (320, 1)}
    for name in ("d0", "p0", "p1"):
        registry.load_changed(worker(name).info.key, WorkerLoad())
    assert _books(registry)[computing] == (320, 1)
    placer.prompt_computed(assignment)
    assert _books(registry) == {"d0": (0, 1), "p0": (0, 0), "p1": (0, 0)}
    placer.prompt_computed(assignment)
    placer.release(assignment)
    assert _books(registry) == {"d0": (0, 0), "p0": (0, 0), "p1": (0, 0)}
    # What was computed is likely to stay cached.
    assert registry.prefix_map.longest_prefix(_names(20)) == {computing: 20}


def test_placer_repeated_prefix_follows_first_request(registry: WorkerRegistry) -> None:
    placer = _placer(registry)
    first = placer.assign(num_tokens=3200, names=_names(200))
    placer.prompt_computed(first)
    for _ in range(8):
        again = placer.assign(num_tokens=3200, names=_names(200))
        placer.prompt_computed(again)
        assert again.computing == first.computing or again.placement.prefill is None


def test_placer_abandoned_prompt_is_not_expected(registry: WorkerRegistry) -> None:
    placer = _placer(registry)
    placer.release(placer.assign(num_tokens=320, names=_names(20)))
    assert registry.prefix_map.longest_prefix(_names(20)) == {}
    for worker_snapshot in registry.snapshots():
        registry.load_changed(worker_snapshot.info.key, WorkerLoad())
    assert set(_books(registry).values()) == {(0, 0)}


def test_placer_rerouted_prefill_moves_its_booking(registry: WorkerRegistry) -> None:
    placer = _placer(registry)
    assignment = placer.assign(num_tokens=320, names=_names(20))
    failed = assignment.computing
    again = placer.reassign_prefill(assignment, frozenset({failed}))
    assert again is not None
    assert assignment.computing == again.info.key != failed
    assert registry.prefix_map.longest_prefix(_names(20)) == {again.info.key.worker_id: 20}
    placer.compute_locally(assignment)
    assert assignment.computing == assignment.decode
    placer.release(assignment)
    for snapshot in registry.snapshots():
        registry.load_changed(snapshot.info.key, WorkerLoad())
    assert set(_books(registry).values()) == {(0, 0)}


def test_ledger_release_for_dead_worker_spares_its_successor(registry: WorkerRegistry) -> None:
    placer = _placer(registry)
    assignment = placer.assign(num_tokens=320, names=_names(20))
    info = worker("d0").info
    registry.left(info.key, "crash")
    registry.joined(replace(info, key=WorkerKey(WorkerId("d0"), Incarnation(2))), _Port())
    placer.release(assignment)
    assert _books(registry)["d0"] == (0, 0)


def test_registry_new_session_starts_without_bookings(registry: WorkerRegistry) -> None:
    placer = _placer(registry)
    lost, kept = (placer.assign(num_tokens=320, names=_names(20)) for _ in range(2))
    for snapshot in registry.snapshots():
        registry.left(snapshot.info.key, "silent for 1.5 s")
        registry.joined(snapshot.info, _Port())
    again = placer.assign(num_tokens=160, names=_names(10))
    now = _books(registry)
    placer.prompt_computed(kept)
    placer.release(kept)
    placer.compute_locally(lost)
    placer.release(lost)
    assert _books(registry) == now
    placer.release(again)
    placer.release(again)
    for snapshot in registry.snapshots():
        registry.load_changed(snapshot.info.key, WorkerLoad())
    assert set(_books(registry).values()) == {(0, 0)}
    assert registry.in_flight() == ()


def test_ledger_load_report_replaces_earlier_bookings(registry: WorkerRegistry) -> None:
    placer, key = _placer(registry), worker("d0").info.key
    registry.load_changed(key, WorkerLoad(num_running=5, backlog_tokens=100))
    registry.assign(key, 40)
    assert _books(registry)["d0"] == (140, 6)
    registry.load_changed(key, WorkerLoad(num_running=6, backlog_tokens=120))
    assert _books(registry)["d0"] == (120, 6)
    assert placer.registry is registry


def test_registry_penalty_keeps_the_longest(registry: WorkerRegistry) -> None:
    key = worker("d0").info.key
    registry.penalise(key, 2.0)
    registry.penalise(key, 1.0)
    assert next(w for w in registry.snapshots() if w.info.key == key).penalty_ms == pytest.approx(2000.0)


def test_registry_worker_in_long_step_is_penalised(registry: WorkerRegistry) -> None:
    key = worker("d0").info.key
    for step_age_s, penalty_ms in ((1.9, 0.0), (2.0, 2000.0)):
        registry.load_changed(key, WorkerLoad(num_running=1, step_age_s=step_age_s))
        assert next(w for w in registry.snapshots() if w.info.key == key).penalty_ms == pytest.approx(penalty_ms)


def test_registry_worker_lost_without_drain_is_warned_of(
    registry: WorkerRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    keys = [worker(name).info.key for name in ("d0", "p0")]
    registry.draining(keys[0], "the worker is stopping")
    for key in keys:
        registry.left(key, "the worker closed the session")
    assert [record.args[0] for record in caplog.records if record.levelname == "WARNING" and record.args] == ["p0"]


def test_registry_other_model_is_rejected_when_empty(registry: WorkerRegistry) -> None:
    ours, other = worker("d9").info, replace(worker("d9").info, model_name="other")
    for snapshot in [None, *registry.snapshots()]:
        if snapshot is not None:
            registry.left(snapshot.info.key, "drained")
        with pytest.raises(WorkerRejected, match=r"model is 'other'.*until it is restarted"):
            registry.joined(other, _Port())
    assert registry.snapshots() == []
    registry.joined(ours, _Port())
    assert registry.status().model_name == ours.model_name


def test_grammar_error_of_worker_names_clients_field() -> None:
    error = InvalidRequest("grammar: too expensive")
    translated = in_clients_field(error, "response_format")
    assert (type(translated), translated.message, translated.param) == (
        InvalidRequest,
        "response_format: too expensive",
        "response_format",
    )
    others = [InvalidRequest("prompt: empty", param="prompt"), InternalError("it failed")]
    assert [in_clients_field(other, "response_format") for other in others] == others
    assert in_clients_field(error, None) is error
