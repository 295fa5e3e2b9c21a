"""Unstreamed answers: tokens after the first are sent in groups, without loss."""

import pytest

from decode_worker.reports import StepReports
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import Incarnation
from tandem.values.outputs import FinishReason, SampledToken
from tests.unit.decode_worker.test_bookkeeping import task
from tests.unit.decode_worker.test_takeover import LONG, PLENTY, adopt, leave, worker
from tests.unit.decode_worker.test_worker import Bench, bench, expected  # noqa: F401  # the fixture
from worker.session_port import SessionPort

TOGETHER = 4


async def deltas(bench: Bench) -> list[pb.TokenDelta]:  # noqa: F811
    """All deltas of one attempt."""
    received: list[pb.TokenDelta] = []
    while not received or not received[-1].HasField("finish"):
        received += (await bench.next_message("tokens")).deltas
    return received


@pytest.mark.parametrize("length", [1, 2, TOGETHER, TOGETHER + 1, 2 * TOGETHER + 1, 2 * TOGETHER + 2])
async def test_unread_tokens_first_sent_alone_others_together(bench: Bench, length: int) -> None:  # noqa: F811
    bench.submit(prefill=False, max_tokens=length, tokens_per_message=TOGETHER)
    received = await deltas(bench)
    whole, rest = divmod(length - 1, TOGETHER)
    sizes = [1, *[TOGETHER] * whole, *([rest] if rest else [])]
    assert [len(delta.token_ids) for delta in received] == sizes
    assert [delta.first_index for delta in received] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert [t for delta in received for t in delta.token_ids] == expected(length)
    assert [delta.HasField("started") for delta in received] == [True, *[False] * (len(sizes) - 1)]
    await bench.assert_empty()


async def test_unread_tokens_together_keep_their_logprobs() -> None:
    port = SessionPort(Incarnation(1))
    one = task(port, "r")
    one.tokens_per_message = TOGETHER
    reports = StepReports(lambda: 0.0, block_bytes=1)
    for index in range(6):
        token = SampledToken(token_id=index, logprob=-float(index))
        reports.token(one, index, token, FinishReason.LENGTH if index == 5 else None)
        reports.send()
    port.finish()
    received = []
    while (message := await port.next()) is not None:
        received += [
            list(zip(d.token_ids, (p.logprob for p in d.logprobs), strict=True)) for d in message.tokens.deltas
        ]
    assert received == [[(0, 0.0)], [(i, -float(i)) for i in range(1, 5)], [(5, -5.0)]]


async def test_unread_takeover_sends_held_tokens_once() -> None:
    async with worker(num_steps=3) as paced:
        paced.submit(prefill=False, max_tokens=LONG, tokens_per_message=PLENTY)
        (first,) = (await paced.next_message("tokens")).deltas
        assert list(first.token_ids) == expected(LONG)[:1]
        leave(paced)
        adopt(paced)
        (so_far,) = (await paced.next_message("tokens")).deltas
        assert list(so_far.token_ids) == expected(LONG)[: len(so_far.token_ids)]
        paced.go_on()
        (rest,) = (await paced.next_message("tokens")).deltas
        assert rest.first_index == len(so_far.token_ids)
        assert [*so_far.token_ids, *rest.token_ids] == expected(LONG)


async def test_unread_tokens_failure_sends_held_tokens() -> None:
    async with worker(num_steps=3) as paced:
        paced.submit(prefill=False, max_tokens=LONG, tokens_per_message=PLENTY, timeout_s=0.5)
        received = [*(await paced.next_message("tokens")).deltas, *(await paced.next_message("tokens")).deltas]
        tokens = [t for delta in received for t in delta.token_ids]
        assert tokens == expected(LONG)[: len(tokens)]
        assert received[-1].first_index + len(received[-1].token_ids) == len(tokens)
        assert received[-1].finish.failure.code == "DeadlineExceeded"
