"""Unstreamed answers. Log probabilities, which may be large, are converted to JSON slice by slice, so that concurrent
streams are not delayed.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.answer.choice_text import TextDelta
from router.http.openai.answers import AnswerFormat
from router.http.openai.prompt_logprobs import SLICE_VALUES, PromptLogprobs

_PIECE_BYTES = 256 << 10


async def whole_content(
    answer: AnswerFormat, choices: Sequence[TextDelta], scores: PromptLogprobs | None = None
) -> dict[str, Any]:
    """Return the answer, for orjson, with the requested log probabilities of prompts."""
    logprobs = [await _logprobs(answer, choice, scores) for choice in choices]
    content = answer.whole(choices, logprobs)
    if scores is not None:
        await scores.add_to(content)
    return content


def _slices(answer: AnswerFormat, choice: TextDelta, scores: PromptLogprobs | None) -> Iterator[dict[str, Any] | None]:
    """Yield slices of an echoed prompt, then of the answer's tokens."""
    if scores is not None and scores.echoes:
        yield answer.echoed_first(choice.choice_index)
        for echoed in scores.echoed(choice.choice_index):
            yield answer.logprobs(replace(choice, tokens=echoed))
    tokens = choice.tokens
    step = max(1, SLICE_VALUES // (1 + len(tokens[0].top_logprobs))) if tokens else 1
    for start in range(0, len(tokens), step):
        yield answer.logprobs(replace(choice, tokens=tokens[start : start + step]))


async def _logprobs(answer: AnswerFormat, choice: TextDelta, scores: PromptLogprobs | None) -> dict[str, Any] | None:
    lists: dict[str, list[bytes]] = {}
    others: dict[str, Any] = {}
    for shown in _slices(answer, choice, scores):
        if shown is None:
            break
        for name, value in shown.items():
            if isinstance(value, list):
                lists.setdefault(name, []).append(orjson.dumps(value)[1:-1])
            else:
                others[name] = value
        await asyncio.sleep(0)
    if not lists:
        return None
    # Each fragment is several elements of its list: nothing large is copied before the end.
    return {name: [orjson.Fragment(part) for part in parts] for name, parts in lists.items()} | others


class WholeResponse(Response):
    """Sends JSON as its client reads it, so that a large answer is not buffered in the transport as well."""

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers, then the body piece by piece."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        body = memoryview(self.body)
        for start in range(0, len(body), _PIECE_BYTES):
            piece = bytes(body[start : start + _PIECE_BYTES])
            more = start + _PIECE_BYTES < len(body)
            await send({"type": "http.response.body", "body": piece, "more_body": more})
