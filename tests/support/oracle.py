"""What the built-in model, or another, says according to `transformers`, and prompts to ask it."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from cluster.cli.demo import STORY
from router.text.tokenizer import Tokenizer
from tandem.model_path import model_directory

BUILTIN = model_directory("builtin")


class Oracle:
    """Greedy generation in fp32, one prompt at a time or several of one length."""

    def __init__(self, model: Path = BUILTIN) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._tokenizer = Tokenizer.load(model)
        self._answers: dict[tuple[int, ...], list[int]] = {}
        """The longest answers so far: tests ask for the same ones, and a shorter one is how a longer one begins."""

    def tokens(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The `max_tokens` most likely tokens, past any end."""
        known = self._answers.get(key := tuple(prompt), [])
        if len(known) < max_tokens:
            known = self._answers[key] = self.batch([prompt], max_tokens)[0]
        return known[:max_tokens]

    def batch(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """The same for prompts of one length."""
        ids = torch.tensor([list(prompt) for prompt in prompts])
        mask = torch.ones_like(ids)
        out = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return out[:, ids.shape[1] :].tolist()

    @torch.no_grad()
    def logprobs(self, prompt: Sequence[int]) -> torch.Tensor:
        """Of every token in the place of each one but the first, `[num_tokens - 1, vocab_size]`."""
        return self._model(torch.tensor([list(prompt)])).logits[0, :-1].log_softmax(-1)

    @torch.no_grad()
    def mean_state(self, prompt: Sequence[int]) -> torch.Tensor:
        """The mean of the last hidden states, behind the final norm."""
        out = self._model(torch.tensor([list(prompt)]), output_hidden_states=True)
        return out.hidden_states[-1][0].mean(0)

    @property
    def end_id(self) -> int:
        """The token that ends an answer."""
        return int(self._model.config.eos_token_id)

    def beams(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        num_beams: int,
        length_penalty: float,
        early_stopping: bool | str,
        end_id: int | None,
    ) -> tuple[list[list[int]], list[float]]:
        """All answers of a beam search, the best first, and their scores."""
        ids = torch.tensor([list(prompt)])
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=num_beams,
            num_return_sequences=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=end_id,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = [row[len(prompt) :].tolist() for row in out.sequences]
        ends = [row.index(end_id) + 1 if end_id in row else len(row) for row in rows]
        return [row[:end] for row, end in zip(rows, ends, strict=True)], out.sequences_scores.tolist()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, as clients see it."""
        return self._tokenizer.decode(token_ids)

    def story(self, seed: int, num_tokens: int) -> list[int]:
        """A prompt of the kind of text that the model knows, unlike those of other seeds from its start on."""
        sentences = STORY.split(". ")
        draw = random.Random(seed)
        text = f"Story {seed}. "
        while len(ids := self.encode(text)) < num_tokens:
            text += f"{draw.choice(sentences)}. The code of {draw.choice(['oak', 'moon'])} is {draw.randrange(10000)}. "
        return ids[:num_tokens]


def noise(seed: int, num_tokens: int) -> list[int]:
    """A prompt of ordinary tokens in no order."""
    draw = random.Random(seed)
    return [draw.randrange(300, 2000) for _ in range(num_tokens)]


def prompts(oracle: Oracle, count: int, *, seed: int = 0) -> list[list[int]]:
    """Prompts long enough for the prefill pool, of odd lengths: stories, noise, and pairs with a common beginning."""
    draw = random.Random(seed)
    made: list[list[int]] = []
    for i in range(count):
        length = draw.choice([81, 96, 97, 159, 200, 257, 400, 640])
        if i % 3 == 0:
            made.append(oracle.story(seed * 1000 + i, length))
        elif i % 3 == 1:
            made.append(noise(seed * 1000 + i, length))
        else:
            made.append([*made[-1][:64], *noise(seed * 1000 + i, length)])
    return made
