"""Tokens that come with nothing else are sent in columns, to routers that gave the attempt a handle."""

from dataclasses import dataclass, field

import pytest

from decode_worker.reports import StepReports, send_all
from decode_worker.task import DecodeTask
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import Incarnation
from tandem.values.outputs import FinishReason, PredictionUse, SampledToken
from tests.unit.decode_worker.test_bookkeeping import task
from tests.unit.decode_worker.test_takeover import LONG, adopt, leave, worker
from tests.unit.decode_worker.test_worker import Bench, bench, expected  # noqa: F401  # the fixture
from worker.session_port import SessionPort


@dataclass
class Answer:
    """What a router that reads columns first makes of a session's messages."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    num_rows: int = 0
    is_over: bool = False

    def read(self, step: pb.StepTokens, handles: dict[str, int]) -> None:
        rows = list(zip(step.handles, step.indexes, step.token_ids, strict=True))
        self.num_rows += len(rows)
        for handle, index, token_id in rows:
            self._add(handle, index, [token_id])
        for delta in step.deltas:
            self._add(handles[delta.request_id], delta.first_index, list(delta.token_ids))
            self.is_over |= delta.HasField("finish")

    def _add(self, handle: int, index: int, token_ids: list[int]) -> None:
        so_far = self.token_ids.setdefault(handle, [])
        assert index == len(so_far), f"token {index} arrived, expected {len(so_far)}"
        so_far += token_ids


@pytest.mark.parametrize("handle", [0, 17])
async def test_columns_have_all_but_first_and_last_token(bench: Bench, handle: int) -> None:  # noqa: F811
    bench.submit(prefill=False, max_tokens=LONG, handle=handle)
    answer = Answer()
    while not answer.is_over:
        answer.read(await bench.next_message("tokens"), {"r": handle})
    assert answer.token_ids == {handle: expected(LONG)}
    assert answer.num_rows == (LONG - 2 if handle else 0)
    await bench.assert_empty()


async def test_takeover_has_a_handle_of_its_own() -> None:
    async with worker(num_steps=3) as paced:
        paced.submit(prefill=False, max_tokens=LONG, handle=4)
        await paced.next_message("tokens")
        leave(paced)
        adopt(paced, handle=9)
        paced.go_on()
        answer = Answer()
        while not answer.is_over:
            answer.read(await paced.next_message("tokens"), {"r": 9})
        assert answer.token_ids == {9: expected(LONG)}
        assert answer.num_rows


def _together(*steps: tuple[DecodeTask, SampledToken, FinishReason | None]) -> pb.StepTokens:
    """Several steps that are sent in one message."""
    port = steps[0][0].port
    reports = StepReports(lambda: 0.0, block_bytes=1)
    for one, token, reason in steps:
        reports.token(one, one.next_index, token, reason)
    reports.send()
    (message,) = port._queue
    return message.tokens


def test_columns_of_one_message_come_before_its_deltas() -> None:
    """A token behind one that had to be a delta is a delta too, and no other attempt is affected."""
    port = SessionPort(Incarnation(1))
    first, second = task(port, "a"), task(port, "b")
    first.handle, second.handle, second.started = 1, 2, True
    step = _together(
        (first, SampledToken(5), None),
        (second, SampledToken(6), None),
        (first, SampledToken(7), None),
    )
    assert list(step.handles) == [2]
    answer = Answer()
    answer.read(step, {"a": 1, "b": 2})
    assert answer.token_ids == {1: [5, 7], 2: [6]}


def test_tokens_of_one_step_are_one_delta() -> None:
    """As speculation brings them: sent apart they would seem to have no time between them."""
    port = SessionPort(Incarnation(1))
    first, second = task(port, "a"), task(port, "b")
    first.handle, second.handle, first.started, second.started = 1, 2, True, True
    step = _together(
        (first, SampledToken(5), None),
        (first, SampledToken(7), None),
        (second, SampledToken(6), None),
        (second, SampledToken(8), None),
        (second, SampledToken(9), FinishReason.LENGTH),
    )
    assert [(delta.request_id, list(delta.token_ids)) for delta in step.deltas] == [("b", [6, 8, 9]), ("a", [5, 7])]
    assert not step.handles
    answer = Answer()
    answer.read(step, {"a": 1, "b": 2})
    assert answer.token_ids == {1: [5, 7], 2: [6, 8, 9]}
    assert answer.is_over


def test_columns_have_no_tokens_with_logprobs() -> None:
    one = task(SessionPort(Incarnation(1)), "a")
    one.handle, one.started = 1, True
    step = _together((one, SampledToken(5, logprob=-1.0), None))
    assert not step.handles
    assert step.deltas[0].logprobs[0].logprob == -1.0


def test_prediction_counts_come_with_the_tokens_that_they_cover() -> None:
    """A lone token whose step rejected drafts is a delta, too; nothing is sent twice."""
    one = task(SessionPort(Incarnation(1)), "a")
    one.handle, one.started = 1, True
    one.prediction = PredictionUse(0, 3)
    rejected = _together((one, SampledToken(5), None))
    assert not rejected.handles
    (delta,) = rejected.deltas
    assert (list(delta.token_ids), delta.prediction.accepted, delta.prediction.rejected) == ([5], 0, 3)
    one.port._queue.clear()
    plain = _together((one, SampledToken(6), None))
    assert (list(plain.handles), list(plain.deltas)) == ([1], [])
    one.port._queue.clear()
    one.prediction = PredictionUse(2, 3)
    last = _together((one, SampledToken(7), None), (one, SampledToken(8), FinishReason.LENGTH))
    (delta,) = last.deltas
    assert delta.HasField("finish")
    assert (delta.prediction.accepted, delta.prediction.rejected) == (2, 3)
    one.port._queue.clear()
    send_all(one)
    (again,) = one.port._queue
    assert again.tokens.deltas[0].prediction.accepted == 2
