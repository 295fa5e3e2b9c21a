"""The output items of one response as they grow: messages and function calls, and their events."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from router.api.answer.call_reader import CallPiece, Piece, TextPiece

ResponseEvent: TypeAlias = dict[str, Any]
"""An event without its sequence number."""
_MESSAGE, _CALL, _REASONING = "message", "function_call", "reasoning"


class ResponseItems:
    """Builds items from an answer's pieces. The same pieces make the same items, whether or not events are streamed."""

    def __init__(self, request_id: str) -> None:
        self.items: list[dict[str, Any]] = []
        self._request_id = request_id
        self._parts: list[str] = []
        """Text or arguments of the last item while it is open."""
        self._is_open = False
        self._logprobs: list[dict[str, Any]] = []
        """Log probabilities of the last item's text."""
        self._num_sent = 0
        """Number of these that were sent in its deltas."""

    def add_pieces(self, pieces: Sequence[Piece], logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[ResponseEvent]:
        """Return the events of the pieces; `logprobs`: of the tokens that came with them, for an answer without
        calls."""
        self._logprobs += logprobs
        for piece in pieces:
            if not isinstance(piece, CallPiece):
                kind = _MESSAGE if isinstance(piece, TextPiece) else _REASONING
                if not self._is_open or self.items[-1]["type"] != kind:
                    yield from self._begin_text(kind)
                yield self._grown(piece.text)
                continue
            if piece.id is not None:
                yield from self._begin_call(piece.id, piece.name or "")
            if piece.arguments:
                yield self._grown(piece.arguments)

    def end(self, *, is_cut: bool) -> Iterator[ResponseEvent]:
        """End the answer; `is_cut`: before it was complete. There is at least one message."""
        if not self.items:
            yield from self._begin_text(_MESSAGE)
        yield from self._close("incomplete" if is_cut else "completed")

    def _begin_text(self, kind: str) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        if kind == _MESSAGE:
            yield self._added({"type": _MESSAGE, "id": self._id("msg"), "role": "assistant", "content": []})
        else:
            yield self._added({"type": _REASONING, "id": self._id("rs"), "summary": [], "content": []})
        yield self._of_item("response.content_part.added", content_index=0, part=_part(kind, ""))

    def _begin_call(self, call_id: str, name: str) -> Iterator[ResponseEvent]:
        yield from self._close("completed")
        yield self._added({"type": _CALL, "id": self._id("fc"), "call_id": call_id, "name": name, "arguments": ""})

    def _added(self, item: dict[str, Any]) -> ResponseEvent:
        self.items.append(item | {"status": "in_progress"})
        self._is_open = True
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(self.items[-1])}

    def _grown(self, text: str) -> ResponseEvent:
        self._parts.append(text)
        if self.items[-1]["type"] == _CALL:
            return self._of_item("response.function_call_arguments.delta", delta=text)
        if self.items[-1]["type"] == _REASONING:
            return self._of_item("response.reasoning_text.delta", content_index=0, delta=text)
        new, self._num_sent = self._logprobs[self._num_sent :], len(self._logprobs)
        return self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=new)

    def _close(self, status: str) -> Iterator[ResponseEvent]:
        if not self._is_open:
            return
        item, text = self.items[-1], "".join(self._parts)
        self._parts.clear()
        self._is_open = False
        item["status"] = status
        if item["type"] == _CALL:
            item["arguments"] = text
            yield self._of_item("response.function_call_arguments.done", name=item["name"], arguments=text)
        else:
            part = _part(item["type"], text, self._logprobs)
            item["content"] = [part]
            if item["type"] == _REASONING:
                yield self._of_item("response.reasoning_text.done", content_index=0, text=text)
            else:
                yield self._of_item("response.output_text.done", content_index=0, text=text, logprobs=self._logprobs)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _of_item(self, kind: str, **fields: Any) -> ResponseEvent:
        index = len(self.items) - 1
        return {"type": kind, "item_id": self.items[index]["id"], "output_index": index, **fields}

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._request_id}{len(self.items):04x}"


def _part(kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    if kind == _REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
