"""Beam search on a tiny model against `transformers` and against an exhaustive search."""

import itertools
import random

import pytest
import torch

from router.dispatch.choices.beam_search import BeamSearch
from router.types.requests import BeamSearchParams
from tandem.values.outputs import FinishReason, SampledToken
from tests.support.engine.paged_harness import reference_model

VOCAB = 97
END = 2
SEVERAL = (2, 5, 11, 40)
QUICK = [
    *itertools.product((False, True, "never"), (-0.8, 2.0), (3,), (SEVERAL,)),
    (False, 1.0, 4, (END,)),
    (True, 1.0, 4, (END,)),
    (False, 0.0, 3, ()),
    (False, 1.0, 1, (END,)),
]


class Toy:
    """Log probabilities that are a function of the last two tokens."""

    def __init__(self, seed: int, vocab: int) -> None:
        draw = random.Random(seed)
        rows = {
            pair: [draw.gauss(0.0, 1.5) for _ in range(vocab)] for pair in itertools.product(range(-1, vocab), repeat=2)
        }
        self._rows = {pair: torch.tensor(row).log_softmax(-1).tolist() for pair, row in rows.items()}

    def __call__(self, tokens: tuple[int, ...]) -> list[float]:
        return self._rows[(-1, -1, *tokens)[-2:]]


def search(ask: BeamSearchParams, max_tokens: int, logprobs) -> BeamSearch:
    found = BeamSearch(ask, max_tokens=max_tokens)
    while not found.is_over:
        steps = []
        for beam in found.running:
            row = logprobs(tuple(token.token_id for token in beam.tokens))
            order = sorted(range(len(row)), key=lambda token: -row[token])[: ask.num_next]
            steps.append([SampledToken(token_id=token, logprob=row[token]) for token in order])
        found.advance(steps)
    return found


def ids(found: BeamSearch) -> list[list[int]]:
    return [[token.token_id for token in one.beam.tokens] for one in found.ended]


@pytest.mark.parametrize("seed", range(6))
def test_beam_search_of_full_width_finds_best_answers(seed: int) -> None:
    toy, length = Toy(seed, 4), 4
    answers = {}
    for size in range(1, length + 1):
        for tokens in itertools.product(range(4), repeat=size):
            if END not in tokens[:-1] and (tokens[-1] == END or size == length):
                total = sum(toy(tokens[:i])[token] for i, token in enumerate(tokens))
                answers[tokens] = total / size**0.7
    best = sorted(answers, key=lambda tokens: -answers[tokens])
    ask = BeamSearchParams(num_beams=256, length_penalty=0.7, early_stopping="never", end_ids=frozenset({END}))
    found = search(ask, length, toy)
    assert [tuple(one) for one in ids(found)][:20] == best[:20]
    assert [one.score for one in found.ended[:20]] == pytest.approx([answers[tokens] for tokens in best[:20]])


@pytest.fixture(scope="module")
def model():
    made = reference_model("LlamaForCausalLM", num_hidden_layers=2, vocab_size=VOCAB)
    with torch.no_grad():
        made.lm_head.weight[list(SEVERAL)] *= 1.6
    return made


CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product((False, True, "never"), (1.0, 0.0, -0.8, 2.0), (1, 3, 4), ((), (END,), SEVERAL))
]


@pytest.mark.in_turns(always=3)
@pytest.mark.parametrize(("early_stopping", "length_penalty", "num_beams", "ends"), CASES)
def test_beam_search_equals_transformers(model, early_stopping, length_penalty: float, num_beams: int, ends) -> None:
    """With end tokens so likely that searches end early as well as late."""
    for seed in range(2):
        prompt = [random.Random(seed).randrange(3, VOCAB) for _ in range(9)]
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, 9, dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=list(ends) or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )

        @torch.no_grad()
        def row(tokens: tuple[int, ...], prompt: list[int] = prompt) -> list[float]:
            return model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].log_softmax(-1).tolist()

        ask = BeamSearchParams(
            num_beams=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            end_ids=frozenset(ends),
        )
        found = search(ask, 12, row)
        expected = [one[9:].tolist() for one in out.sequences]
        assert ids(found) == [up_to_end(one, ends) for one in expected]
        if num_beams > 1:
            assert [one.score for one in found.ended] == pytest.approx(out.sequences_scores.tolist(), abs=1e-4)
        for one in found.ended:
            is_end = one.beam.tokens[-1].token_id in ends
            assert one.reason is (FinishReason.STOP if is_end else FinishReason.LENGTH)


def up_to_end(tokens: list[int], ends) -> list[int]:
    """Without the row's padding."""
    return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))]
