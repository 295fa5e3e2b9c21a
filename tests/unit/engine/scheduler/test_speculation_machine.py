"""The scheduler's state machine tests with drafts in every step: right, wrong, and right up to some place."""

from collections import Counter
from collections.abc import Sequence
from random import Random

from hypothesis import HealthCheck, settings

from engine.scheduler.scheduler import Scheduler
from engine.types.config import SchedulerConfig
from engine.types.request import Batch
from tandem.values.block_hash import BlockHasher
from tests.support.engine import drafts, ledger
from tests.unit.engine.scheduler.test_lookahead_machine import PipelinedMachine
from tests.unit.engine.scheduler.test_scheduler_machine import SchedulerMachine

LIMITS = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def with_drafts(sched: Scheduler, answers: drafts.Answers) -> Scheduler:
    """As many drafts, and as wrong ones, as the bounds that hypothesis has chosen say: so examples can be repeated."""
    bounds = sched._config
    proposer = drafts.HalfRight(answers, ledger.VOCAB, Random(bounds.num_blocks * 100 + bounds.max_batched_tokens))
    sched._speculation = drafts.speculation(proposer, most=1 + bounds.prefill_chunk_tokens % 9)
    return sched


class SpeculatingMachine(SchedulerMachine):
    """Every finished request must have the output that it has without drafts."""

    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        return with_drafts(super().make_scheduler(config), self.expected)

    def check_writes(self, batch: Batch) -> None:
        super().check_writes(batch)
        check_drafts(self.sched, batch, [])


class PipelinedSpeculatingMachine(PipelinedMachine):
    """The same with a step always in flight: nothing is planned behind drafts that are being verified."""

    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        return with_drafts(super().make_scheduler(config), self.expected)

    def check_writes(self, batch: Batch) -> None:
        super().check_writes(batch)
        check_drafts(self.sched, batch, [step.batch for step in self.late.pending])
        verifying = {other.request for step in self.late.pending for other in step.batch.items if other.drafts}
        assert verifying.isdisjoint(item.request for item in batch.items)


class PredictedMachine(SchedulerMachine):
    """The same with drafts from predictions that are right for the most part."""

    def make_scheduler(self, config: SchedulerConfig) -> Scheduler:
        sched = super().make_scheduler(config)
        rng = Random(config.num_blocks * 100 + config.max_batched_tokens)
        proposer = drafts.EditedPrediction(self.expected, ledger.VOCAB, rng)
        sched._speculation = drafts.speculation(proposer, most=1 + config.prefill_chunk_tokens % 9)
        return sched

    def check_writes(self, batch: Batch) -> None:
        super().check_writes(batch)
        check_drafts(self.sched, batch, [])


def check_drafts(sched: Scheduler, batch: Batch, pending: Sequence[Batch]) -> None:
    """Drafts keep within the budget, the request's length and blocks that nobody else has, but to copy them before."""
    config: SchedulerConfig = sched._config
    read = Counter(copy.source for one in (batch, *pending) for copy in one.copies)
    assert batch.num_tokens <= config.max_batched_tokens
    for item in batch.items:
        if item.drafts:
            request, end = item.request, item.start + item.num_tokens + len(item.drafts)
            assert item.samples
            assert item.num_tokens == 1
            assert end < (request.end_rule.max_tokens if request.end_rule else 0)
            assert end <= len(request.block_table) * ledger.BLOCK
            for i in range(item.start // ledger.BLOCK, len(request.block_table)):
                block = request.block_table[i]
                assert sched.blocks.pool.num_refs(block) - read[block] == 1


SpeculatingMachine.TestCase.settings = LIMITS
PipelinedSpeculatingMachine.TestCase.settings = LIMITS
PredictedMachine.TestCase.settings = LIMITS
TestSpeculating = SpeculatingMachine.TestCase
TestPipelinedSpeculating = PipelinedSpeculatingMachine.TestCase
TestPredicted = PredictedMachine.TestCase


def test_scheduler_oracle_takes_fewer_steps_and_counts_what_it_kept() -> None:
    prompts = [[k % 7 for k in range(20 + i)] for i in range(3)]
    params = [request.params._replace(max_tokens=24) for request in map(ledger.request, prompts)]
    oracle = drafts.Oracle(
        lambda request: ledger.continuation(request.token_ids[: request.num_prompt_tokens], request.params)
    )
    num_steps = {}
    for proposer in (None, oracle):
        speculation = None if proposer is None else drafts.speculation(proposer, most=5)
        sched = Scheduler(ledger.config(), BlockHasher(ledger.SECRET), speculation=speculation)
        runner = ledger.LedgerRunner()
        requests = [ledger.request(prompt, params=given) for prompt, given in zip(prompts, params, strict=True)]
        for request in requests:
            sched.add(request)
        num_accepted = steps = 0
        while (batch := sched.schedule(0.0)) is not None:
            output = sched.commit(batch, runner.execute(batch))
            assert output.num_accepted_tokens <= batch.num_draft_tokens
            num_accepted += output.num_accepted_tokens
            steps += 1
        ledger.assert_empty(sched)
        for request in requests:
            expected = ledger.continuation(request.token_ids[: request.num_prompt_tokens], request.params)
            assert list(request.token_ids[request.num_prompt_tokens :]) == expected
        num_steps[proposer is not None] = steps
    assert oracle.num_kept == oracle.num_proposed == num_accepted > 30
    assert num_steps[True] <= num_steps[False] // 3
    assert set(oracle.forgotten) == set(requests)


def test_scheduler_full_pool_cuts_drafts_and_preempts_nobody() -> None:
    """Two sequences fill all blocks but one: the drafts that need another are cut, the rest is verified."""
    oracle = drafts.Oracle(
        lambda request: ledger.continuation(request.token_ids[: request.num_prompt_tokens], request.params)
    )
    config = ledger.config(num_blocks=4, max_model_len=64)
    sched = Scheduler(config, BlockHasher(ledger.SECRET), speculation=drafts.speculation(oracle, most=8))
    runner, params = ledger.LedgerRunner(), ledger.request([1]).params._replace(max_tokens=14)
    requests = [ledger.request([i] * 18, params=params) for i in range(2)]
    for request in requests:
        sched.add(request)
    lengths = []
    while (batch := sched.schedule(0.0)) is not None:
        lengths += [len(item.drafts) for item in batch.items]
        sched.commit(batch, runner.execute(batch))
    assert max(lengths) == 8
    assert not any(request.num_preemptions for request in requests)
    ledger.assert_empty(sched)


def test_scheduler_predictions_are_kept_where_right_and_settled_drafts_add_up() -> None:
    prompts = [[k % 7 for k in range(20 + i)] for i in range(3)]
    proposer = drafts.EditedPrediction(
        lambda request: ledger.continuation(request.token_ids[: request.num_prompt_tokens], request.params),
        ledger.VOCAB,
        Random(3),
    )
    sched = Scheduler(ledger.config(), BlockHasher(ledger.SECRET), speculation=drafts.speculation(proposer, most=5))
    runner, params = ledger.LedgerRunner(), ledger.request([1]).params._replace(max_tokens=60, ignore_eos=True)
    requests = [ledger.request(prompt, params=params) for prompt in prompts]
    for request in requests:
        sched.add(request)
    drafted = kept = 0
    while (batch := sched.schedule(0.0)) is not None:
        output = sched.commit(batch, runner.execute(batch))
        assert sum(draft.num_tokens for draft in output.drafts) == batch.num_draft_tokens
        assert sum(draft.num_kept for draft in output.drafts) == output.num_accepted_tokens
        assert {draft.source for draft in output.drafts} <= {"prediction"}
        drafted, kept = drafted + batch.num_draft_tokens, kept + output.num_accepted_tokens
    for request in requests:
        expected = ledger.continuation(request.token_ids[: request.num_prompt_tokens], request.params)
        assert list(request.token_ids[request.num_prompt_tokens :]) == expected
    assert drafted > kept == proposer.num_kept > 60
    ledger.assert_empty(sched)
