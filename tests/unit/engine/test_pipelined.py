"""A pipelined engine gives the tokens of an unpipelined one; and NaN."""

import random
import threading

import pytest
import torch

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.engine import Engine
from engine.model.loader import load_model
from engine.types.request import FinishReason
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.delayed import DelayedRunner, DelayedStep
from tests.support.engine.paged_harness import random_tokens, reference_model
from tests.support.engine.serve import Serve, every_way_to_sample
from tests.unit.engine.test_engine_loop import WAIT_S, running

KERNELS = ("torch", "auto")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    reference_model("Qwen3ForCausalLM", num_hidden_layers=2).save_pretrained(path)
    cpu = torch.device("cpu")
    return {
        kernels: load_model(
            path, backend=select_backend(BackendOptions(device=cpu, dtype="float32", kernels=kernels, num_threads=1))
        )
        for kernels in KERNELS
    }


@pytest.mark.parametrize("kernels", KERNELS)
def test_pipelined_tokens_equal_unpipelined(models, kernels):
    """In a pool that is too small for all, so that some are preempted."""
    answers, ends = [], set()
    for pipelined in (False, True):
        with Serve(models[kernels], pipelined=pipelined, num_blocks=8, prefill_chunk_tokens=20) as serve:
            served = serve.run(every_way_to_sample(random.Random(4), 14))
            assert serve.preemptions
        answers.append([(answer.ids, answer.reason) for answer in served])
        logprobs = [(token.logprob, token.top_logprobs) for answer in served for token in answer.tokens]
        assert any(own is not None for own, _ in logprobs)
        ends |= {answer.reason for answer in served}
    assert answers[0] == answers[1]
    assert ends == {FinishReason.STOP, FinishReason.LENGTH}


class Poisoned:
    """The model's head, with NaN in one sequence's row of logits: the one whose last hidden state was recognised."""

    def __init__(self, decoder, victim):
        self._logits = decoder.logits
        self._victim = victim

    def __call__(self, hidden):
        logits = self._logits(hidden)
        logits[(hidden - self._victim).abs().amax(-1) < 1e-5, 3] = float("nan")
        return logits


@pytest.mark.parametrize("pipelined", [False, True])
def test_pipelined_nan_fails_only_its_request_and_is_not_cached(models, pipelined, monkeypatch):
    model = models["torch"]
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [random_tokens(random.Random(i), 40) for i in range(3)]

    def ask():
        return [ledger.request(prompt, params=params, arrival_s=float(i)) for i, prompt in enumerate(prompts)]

    with Serve(model, pipelined=pipelined) as serve:
        expected = [answer.ids for answer in serve.run(ask())]
        seen = []
        forward = model.forward
        monkeypatch.setattr(model, "forward", lambda *args: seen.append(forward(*args)) or seen[-1])
        (alone,) = serve.run([ledger.request(prompts[1], params=params)])
        assert alone.ids == expected[1]
        # In its third step, counted from the prompt's.
        monkeypatch.setattr(model, "logits", Poisoned(model, seen[2][-1].clone()))
        healthy, failed, last = serve.run(ask())
        assert (failed.ids, failed.reason) == (expected[1][:2], FinishReason.ERROR)
        assert [healthy.ids, last.ids] == [expected[0], expected[2]]
        assert healthy.reason is last.reason is FinishReason.LENGTH
        monkeypatch.undo()
        found = [serve.engine.call(lambda s, r=r: s.match_prefix(r)).result(WAIT_S) for r in ask()]
        assert found[0] == found[2] == 32
        assert found[1] == 0
        assert [answer.ids for answer in serve.run(ask())] == expected
    ledger.assert_empty(serve.scheduler)


class GatedSteps(DelayedRunner):
    """Signals its launch, and returns a step's tokens only when released."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def launch(self, batch, _on_layers=None):
        step = super().launch(batch)
        self.launches.release()
        return step

    def run_until(self, wanted: DelayedStep) -> None:
        assert self.go_on.acquire(timeout=WAIT_S)
        super().run_until(wanted)


def test_pipelined_step_is_launched_before_previous_tokens_arrive():
    runner = GatedSteps()
    with running(runner, pipelined=True) as harness:
        request = ledger.request(range(10), params=SamplingParams(max_tokens=3, ignore_eos=True))
        harness.engine.call(lambda s: s.add(request)).result(WAIT_S)
        for _ in range(2):
            assert runner.launches.acquire(timeout=WAIT_S)
        assert runner.num_computed == 0
        for _ in range(3):
            runner.go_on.release()
        assert harness.tokens(1)[request.request_id] == ledger.continuation(range(10), request.params)
    assert runner.num_fed == 2
    assert runner.num_computed == 12  # no row after the last token, whose place was known


def test_pipelined_abort_keeps_blocks_until_step_ends():
    runner = GatedSteps()
    with running(runner, pipelined=True) as harness:
        request = ledger.request(range(40), params=SamplingParams(max_tokens=50, ignore_eos=True))
        harness.engine.call(lambda s: s.add(request)).result(WAIT_S)
        for _ in range(3):
            assert runner.launches.acquire(timeout=WAIT_S)
            runner.go_on.release()

        def abort(scheduler):
            assert scheduler.abort(request.request_id)
            scheduler.check_invariants()
            return scheduler.load().num_used_blocks

        pending = harness.engine.call(abort)
        for _ in range(3):
            runner.go_on.release()
        assert pending.result(WAIT_S) == 3
        assert harness.tokens(1)[request.request_id]
    ledger.assert_empty(harness.scheduler)


class TimedRunner(DelayedRunner):
    """A step takes a second per row: of the launch where the host computes, of the device's time where that does."""

    def __init__(self, *, is_late: bool) -> None:
        super().__init__()
        self.now = 0.0
        self._is_late = is_late
        self._over_s = {}

    def launch(self, batch, _on_layers=None):
        step = super().launch(batch)
        if self._is_late:
            self._over_s[step] = max([self.now, *self._over_s.values()]) + batch.num_tokens
        else:
            self.now += batch.num_tokens
            self._over_s[step] = self.now
        self.now += 0.25  # the host's own work
        return step

    def run_until(self, wanted):
        super().run_until(wanted)
        self.now = max(self.now, self._over_s[wanted])

    def is_over(self, step):
        return self.now >= self._over_s[step]


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("pipelined", [False, True])
def test_pipelined_step_duration_on_any_device_is_its_own(pipelined, is_late):
    """Rates are derived from these: a prompt's step must not include the next decode step."""
    runner, outputs = TimedRunner(is_late=is_late), []
    scheduler = ledger.scheduler(prefill_chunk_tokens=48)
    engine = Engine(
        scheduler=scheduler,
        runner=runner,
        on_step=outputs.append,
        on_fatal=lambda _: None,
        clock=lambda: runner.now,
        pipelined=pipelined,
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    for i in range(3):
        scheduler.add(ledger.request([i] * 40, params=params))
        for _ in range(4):
            engine._step()
    while engine._step():
        pass
    timings = [output.timings for output in outputs if output.timings is not None]
    assert {one.num_tokens for one in timings} > {40, 42, 1, 2, 3}
    wrong = [one for one in timings if not one.num_tokens <= one.execute_s <= one.num_tokens + 0.5]
    assert wrong == []
    assert all(one.is_overlapped == (pipelined and is_late) for one in timings)
