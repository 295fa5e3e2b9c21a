"""Prompt logprobs in answers: formats vLLM's `prompt_logprobs`, and OpenAI's for an echoed prompt.

Built slice by slice, as JSON, so that concurrent streams are not delayed.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from msgspec import Struct

from router.api.request.client_request import PreparedRequest
from router.http.openai.logprobs import finite
from router.text.tokenizer import Tokenizer
from router.types.prompt_logprobs import ScoredPrompt
from tandem.values.outputs import SampledToken, TokenLogprob

SLICE_VALUES = 2048
"""Tokens and alternatives formatted in one turn of the loop: some milliseconds."""


class PromptLogprobOptions(Struct, frozen=True, kw_only=True):
    """The log probabilities of its prompts that a client requested."""

    prompt_logprobs: int | None = None
    echoed: int | None = None
    """Alternatives with each echoed token."""


class PromptLogprobs:
    """The log probabilities of all prompts of one call."""

    def __init__(
        self,
        shown: PromptLogprobOptions,
        prepared: Sequence[PreparedRequest],
        scored_prompts: Mapping[int, ScoredPrompt],
        tokenizer: Tokenizer,
    ) -> None:
        """`scored_prompts`: by the index of each prompt's first choice."""
        self._shown = shown
        self._prompts = [one.request.prompt_token_ids for one in prepared]
        self._choices = prepared[0].request.num_choices
        self._scored_prompts = scored_prompts
        self._tokenizer = tokenizer

    @property
    def echoes(self) -> bool:
        """Whether they precede those of the answers."""
        return self._shown.echoed is not None

    def echoed(self, choice_index: int) -> Iterator[tuple[SampledToken, ...]]:
        """Yield the prompt of a choice as if it had been generated, from its second token on."""
        num_top = self._shown.echoed or 0
        prompt, scored = self._of(choice_index // self._choices)
        step = max(1, SLICE_VALUES // (1 + num_top))
        for begin in range(0, len(scored), step):
            places = range(begin, min(begin + step, len(scored)))
            yield tuple(_as_sampled(prompt[i + 1], scored, i, num_top) for i in places)

    async def add_to(self, content: dict[str, Any]) -> None:
        """Put `prompt_logprobs` where vLLM has them: into a completion's choices, and beside those of a chat."""
        if self._shown.prompt_logprobs is None:
            return
        is_chat = content["object"] == "chat.completion"
        for index in range(len(self._prompts)):
            found = await self._prompt_logprobs(index, self._shown.prompt_logprobs)
            first = index * self._choices
            for holder in [content] if is_chat else content["choices"][first : first + self._choices]:
                holder["prompt_logprobs"] = found

    def _of(self, index: int) -> tuple[Sequence[int], ScoredPrompt]:
        return self._prompts[index], self._scored_prompts[index * self._choices]

    async def _prompt_logprobs(self, index: int, num_top: int) -> list[orjson.Fragment]:
        """Return null for the first token; for each other one an object by token id: its own, and the most likely."""
        prompt, scored = self._of(index)
        parts = [orjson.Fragment(b"null")]
        step = max(1, SLICE_VALUES // (1 + num_top))
        for begin in range(0, len(scored), step):
            places = range(begin, min(begin + step, len(scored)))
            shown = [self._place(prompt[i + 1], scored, i, num_top) for i in places]
            parts.append(orjson.Fragment(orjson.dumps(shown)[1:-1]))
            await asyncio.sleep(0)
        return parts

    def _place(self, own: int, scored: ScoredPrompt, index: int, num_top: int) -> dict[str, Any]:
        found = {str(own): self._entry(own, scored.logprobs[index], scored.ranks[index])}
        for rank, (token_id, logprob) in enumerate(scored.top(index)[:num_top], 1):
            found.setdefault(str(token_id), self._entry(token_id, logprob, rank))
        return found

    def _entry(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = self._tokenizer.bytes_of(token_id).decode(errors="replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}


def _as_sampled(token_id: int, scored: ScoredPrompt, index: int, num_top: int) -> SampledToken:
    top = tuple(TokenLogprob(token_id=other, logprob=value) for other, value in scored.top(index)[:num_top])
    return SampledToken(token_id=token_id, logprob=scored.logprobs[index], top_logprobs=top)
