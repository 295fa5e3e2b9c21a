"""Unstreamed answers. Log probabilities, which may be large, are converted to JSON slice by slice, so that concurrent
streams are not delayed.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.answer.choice_text import TextDelta
from router.http.body.client_link import WHOLE_ANSWER, link_of
from router.http.openai.answers import AnswerFormat
from router.http.openai.prompt_logprobs import SLICE_VALUES, PromptLogprobs

_PIECE_BYTES = 256 << 10


async def whole_content(
    answer: AnswerFormat,
    choices: Sequence[TextDelta],
    scores: PromptLogprobs | None = None,
    *,
    has_logprobs: bool = True,
) -> dict[str, Any]:
    """Return the answer, for orjson, with the requested log probabilities of prompts. `has_logprobs`: False where the
    choices' tokens are known to have none."""
    logprobs: list[dict[str, Any] | None] = [None] * len(choices)
    if has_logprobs or scores is not None:
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

    def __init__(self, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        # Not starlette's own, which takes several calls to find out what is known here.
        self.status_code, self.background, self.body = 200, None, body
        self.raw_headers = []
        for name, value in (headers or {}).items():
            self.raw_headers.append((name.lower().encode("latin-1"), value.encode("latin-1")))
        self.raw_headers += [(b"content-length", b"%d" % len(body)), (b"content-type", self.media_type.encode())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer at once if it is small, else the headers, then the body piece by piece."""
        if len(self.body) <= _PIECE_BYTES and link_of(scope) is not None:
            whole = {"type": WHOLE_ANSWER, "status": self.status_code, "headers": self.raw_headers, "body": self.body}
            await send(whole)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if len(self.body) <= _PIECE_BYTES:
            await send({"type": "http.response.body", "body": self.body, "more_body": False})
            return
        body = memoryview(self.body)
        for start in range(0, len(body), _PIECE_BYTES):
            piece = bytes(body[start : start + _PIECE_BYTES])
            more = start + _PIECE_BYTES < len(body)
            await send({"type": "http.response.body", "body": piece, "more_body": more})
