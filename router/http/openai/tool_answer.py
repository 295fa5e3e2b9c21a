"""The formats chat.completion and chat.completion.chunk for answers that may call tools, or reason first."""

from collections.abc import Sequence
from typing import Any

from router.api.answer.call_reader import CALLED, Piece, ReasoningPiece, TextPiece, new_answer_parser
from router.api.answer.choice_text import TextDelta
from router.api.request.client_request import PreparedRequest
from router.http.openai.answers import AnswerHead, ChatAnswer
from router.text.tokenizer import Tokenizer

_THINKING = "reasoning_content"
_FUNCTION = "function_call"
"""The older form's name for both the field and the finish reason."""


class CallingChatAnswer(ChatAnswer):
    """Puts everything of one delta into one chunk: a client may have to continue after any chunk."""

    def __init__(
        self,
        head: AnswerHead,
        prepared: Sequence[PreparedRequest],
        tokenizer: Tokenizer,
        *,
        is_older_form: bool = False,
    ) -> None:
        """`is_older_form`: the client sent `functions`, and expects one `function_call` instead of `tool_calls`."""
        super().__init__(head, prepared, tokenizer)
        self.is_text_only = False
        self._is_older_form = is_older_form
        self._readers = [new_answer_parser(prepared[0], i) for i in range(prepared[0].request.num_choices)]

    def opening(self) -> list[dict[str, Any]]:
        """Return the opening chunks, see ChatAnswer. There is no content until some arrives."""
        chunks = super().opening()
        for chunk in chunks:
            chunk["choices"][0]["delta"]["content"] = None
        return chunks

    def text_fields(self, delta: TextDelta) -> dict[str, Any]:
        message = _message(self._readers[delta.choice_index].read(delta))
        return _in_older_form(message) if self._is_older_form else message

    def reason(self, delta: TextDelta) -> str | None:
        if delta.finish is None:
            return None
        reason = self._readers[delta.choice_index].finish(delta.finish.reason)
        return _FUNCTION if self._is_older_form and reason == CALLED else reason

    def whole_message(self, delta: TextDelta) -> dict[str, Any]:
        message = self.text_fields(delta)
        calls, function = message.get("tool_calls"), message.get(_FUNCTION)
        content: dict[str, Any] = {
            "content": message.get("content", "" if calls is None and function is None else None)
        }
        if _THINKING in message:
            content[_THINKING] = message[_THINKING]
        if function is not None:
            return content | {_FUNCTION: function}
        if calls is None:
            return content
        return content | {"tool_calls": [{k: v for k, v in call.items() if k != "index"} for call in calls]}


def _message(pieces: Sequence[Piece]) -> dict[str, Any]:
    """Return the message of the pieces, with an entry for each call."""
    texts, thoughts = list[str](), list[str]()
    calls = dict[int, dict[str, Any]]()
    for piece in pieces:
        if isinstance(piece, TextPiece):
            texts.append(piece.text)
            continue
        if isinstance(piece, ReasoningPiece):
            thoughts.append(piece.text)
            continue
        call = calls.setdefault(piece.call, {"index": piece.call, "function": {"arguments": ""}})
        if piece.id is not None:
            call |= {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
        call["function"]["arguments"] += piece.arguments
    message: dict[str, Any] = {"content": "".join(texts)} if texts else {}
    if thoughts:
        message[_THINKING] = "".join(thoughts)
    return message | ({"tool_calls": list(calls.values())} if calls else {})


def _in_older_form(message: dict[str, Any]) -> dict[str, Any]:
    """Convert a message's only call to a `function_call`, which has no id."""
    calls = message.pop("tool_calls", ())
    return message | ({_FUNCTION: calls[0]["function"]} if calls else {})
