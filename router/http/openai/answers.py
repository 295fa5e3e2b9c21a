"""The two formats of an answer, chat and completions, streamed in chunks or whole."""

from collections.abc import Sequence
from typing import Any, Protocol

from msgspec import Struct

from router.api.answer.choice_text import TextDelta
from router.api.request.client_request import PreparedRequest
from router.http.openai.logprobs import Logprobs
from router.text.tokenizer import Tokenizer
from tandem.errors import InvariantError


class AnswerHead(Struct, frozen=True, kw_only=True):
    """The fields that every chunk of one answer repeats, and what the client requested."""

    id: str
    created_s: int
    model: str
    return_token_ids: bool = False
    echo: bool = False
    tokens_as_ids: bool = False
    """Whether log probabilities name tokens by id."""


class AnswerFormat(Protocol):
    """Formats the answers of one route. Chunks carry neither usage nor timing; the route adds them."""

    @property
    def is_text_only(self) -> bool:
        """Whether chunks between the first and a choice's last contain nothing but its text."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks before the first token."""
        ...

    def chunks(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the chunks of one delta; none when it shows nothing yet."""
        ...

    def ending(self) -> dict[str, Any]:
        """Return a chunk without choices, for usage."""
        ...

    def echoed_first(self, index: int) -> dict[str, Any]:
        """Return the log probabilities of the first token of an echoed prompt, by choice."""
        ...

    def logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        """Return log probabilities of the delta's tokens, which follow those of earlier calls; None when not
        requested."""
        ...

    def whole(self, choices: Sequence[TextDelta], logprobs: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
        """Return the unstreamed answer, with the log probabilities of each choice."""
        ...


class ChatAnswer:
    def __init__(self, head: AnswerHead, prepared: Sequence[PreparedRequest], tokenizer: Tokenizer) -> None:
        self._head = head
        request = prepared[0].request
        self._num_choices = request.num_choices
        self._prompt_ids = request.prompt_token_ids if head.return_token_ids else None
        self._logprobs = Logprobs(tokenizer, as_ids=head.tokens_as_ids)
        self.is_text_only = _is_text_only(head, prepared)

    def opening(self) -> list[dict[str, Any]]:
        """Return one chunk with the role for each choice."""
        chunks = [
            self._chunk([_chat_choice(i, {"role": "assistant", "content": ""})]) for i in range(self._num_choices)
        ]
        if self._prompt_ids is not None:
            chunks[0]["prompt_token_ids"] = list(self._prompt_ids)
        return chunks

    def chunks(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Return the content, then the end."""
        chunks = []
        logprobs = self.logprobs(delta)
        shown = self.text_fields(delta)
        if shown or logprobs or (self._head.return_token_ids and delta.tokens):
            choice = _chat_choice(delta.choice_index, shown or {"content": ""})
            choice["logprobs"] = logprobs
            if self._head.return_token_ids:
                choice["token_ids"] = [token.token_id for token in delta.tokens]
            chunks.append(self._chunk([choice]))
        if delta.finish is not None:
            ending = {"finish_reason": self.reason(delta), "stop_reason": delta.stopped_by}
            chunks.append(self._chunk([_chat_choice(delta.choice_index, {}) | ending]))
        return chunks

    def text_fields(self, delta: TextDelta) -> dict[str, Any]:
        """Return the fields for the delta's text; empty when there is nothing to show."""
        return {"content": delta.text} if delta.text else {}

    def reason(self, delta: TextDelta) -> str | None:
        """Return why the choice ended, once the delta was shown."""
        return None if delta.finish is None else delta.finish.reason.value

    def whole_message(self, delta: TextDelta) -> dict[str, Any]:
        """Return the message for a choice's whole text."""
        return {"content": delta.text}

    def ending(self) -> dict[str, Any]:
        return self._chunk([])

    def echoed_first(self, index: int) -> dict[str, Any]:
        """Raise InvariantError: a conversation is not echoed."""
        raise InvariantError(f"echo was requested for choice {index} of a conversation")

    def logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        return self._logprobs.chat(delta.tokens)

    def whole(self, choices: Sequence[TextDelta], logprobs: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
        content: dict[str, Any] = _head(self._head, "chat.completion")
        shown = content["choices"] = list[dict[str, Any]]()
        for choice, scores in zip(choices, logprobs, strict=True):
            shown.append(self._whole_choice(choice, scores))
        if self._prompt_ids is not None:
            content["prompt_token_ids"] = list(self._prompt_ids)
        return content

    def _whole_choice(self, delta: TextDelta, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.choice_index,
            "message": {"role": "assistant", **self.whole_message(delta), "refusal": None},
            "logprobs": logprobs,
            "finish_reason": self.reason(delta),
            "stop_reason": delta.stopped_by,
        }
        if self._head.return_token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
        return choice

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**_head(self._head, "chat.completion.chunk"), "choices": choices}


class CompletionAnswer:
    """The text_completion format, for one prompt or several."""

    def __init__(self, head: AnswerHead, prepared: Sequence[PreparedRequest], tokenizer: Tokenizer) -> None:
        self._head = head
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._logprobs = Logprobs(tokenizer, as_ids=head.tokens_as_ids)
        self._offsets: dict[int, int] = {}
        """Offset at which the next token's text begins, by choice; for logprobs."""
        self.is_text_only = _is_text_only(head, prepared)

    def opening(self) -> list[dict[str, Any]]:
        """Return the echoed prompt, and its token ids."""
        chunks = []
        for index in range(len(self._prepared) * self._prepared[0].request.num_choices):
            choice = {"index": index, "text": self._echoed(index), "logprobs": None, "finish_reason": None}
            if self._head.return_token_ids:
                choice |= {"token_ids": [], "prompt_token_ids": self._prompt_ids(index)}
            if choice["text"] or self._head.return_token_ids:
                chunks.append(self.ending() | {"choices": [choice]})
        return chunks

    def chunks(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Return text and end in one chunk."""
        logprobs = self.logprobs(delta)
        if not (delta.text or logprobs or delta.finish or (self._head.return_token_ids and delta.tokens)):
            return []
        choice = {"index": delta.choice_index, "text": delta.text, "logprobs": logprobs, **_ending(delta)}
        if self._head.return_token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
        return [self.ending() | {"choices": [choice]}]

    def ending(self) -> dict[str, Any]:
        return {**_head(self._head, "text_completion"), "choices": []}

    def whole(self, choices: Sequence[TextDelta], logprobs: Sequence[dict[str, Any] | None]) -> dict[str, Any]:
        shown = [self._whole_choice(*each) for each in zip(choices, logprobs, strict=True)]
        return self.ending() | {"choices": shown}

    def _whole_choice(self, delta: TextDelta, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": delta.choice_index,
            "text": self._echoed(delta.choice_index) + delta.text,
            "logprobs": logprobs,
            **_ending(delta),
        }
        if self._head.return_token_ids:
            choice["token_ids"] = [token.token_id for token in delta.tokens]
            choice["prompt_token_ids"] = self._prompt_ids(delta.choice_index)
        return choice

    def _of(self, index: int) -> PreparedRequest:
        return self._prepared[index // self._prepared[0].request.num_choices]

    def _prompt_ids(self, index: int) -> list[int]:
        return list(self._of(index).request.prompt_token_ids)

    def _echoed(self, index: int) -> str:
        if not self._head.echo:
            return ""
        prompt = self._of(index)
        if prompt.prompt_text is not None:
            return prompt.prompt_text
        return self._tokenizer.decode(prompt.request.prompt_token_ids)

    def echoed_first(self, index: int) -> dict[str, Any]:
        """Return empty log probabilities for the first token of a choice's prompt, which has none."""
        text = self._logprobs.text(self._of(index).request.prompt_token_ids[0])
        self._offsets[index] = len(text)
        name = self._logprobs.name(self._of(index).request.prompt_token_ids[0])
        return {"tokens": [name], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}

    def logprobs(self, delta: TextDelta) -> dict[str, Any] | None:
        offset = self._offsets.get(delta.choice_index, 0)
        if delta.passed:
            offset = self._logprobs.completion(delta.passed, offset)[1]
        logprobs, self._offsets[delta.choice_index] = self._logprobs.completion(delta.tokens, offset)
        return logprobs


def _head(head: AnswerHead, kind: str) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created_s, "model": head.model}


def _is_text_only(head: AnswerHead, prepared: Sequence[PreparedRequest]) -> bool:
    return not head.return_token_ids and prepared[0].request.sampling.num_logprobs is None


def _chat_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _ending(delta: TextDelta) -> dict[str, Any]:
    reason = delta.finish.reason.value if delta.finish else None
    return {"finish_reason": reason, "stop_reason": delta.stopped_by}
