"""The position in one streamed answer, sent with each event to clients that ask for it, over HTTP or gRPC."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from router.api.answer.choice_text import TextDelta
from router.api.answer.stream_ids import LAST_EVENT_ID, MAX_CHOICES, StreamIds
from router.api.request.client_request import PreparedRequest
from router.types.stream_position import ChoicePosition, StreamHead, StreamPosition
from tandem.errors import InvalidRequest

_SEED_MASK = (1 << 64) - 1


class StreamCursor:
    """Advances with the events of one stream."""

    def __init__(
        self,
        prepared: Sequence[PreparedRequest],
        ids: StreamIds | None,
        seen: StreamPosition | None,
        *,
        clock: Callable[[], float] = time.time,
        param: str = LAST_EVENT_ID,
    ) -> None:
        """Without `ids`, or for more choices than an id can hold, events have no ids.

        Raises InvalidRequest when `seen` belongs to another request; `param`: the field that the client sent it in.
        """
        self._seen = seen
        request = prepared[0].request
        self._ids = ids if len(prepared) == 1 and request.num_choices <= MAX_CHOICES else None
        self._choices = [replace(has) for has in prepared[0].has] or [
            ChoicePosition() for _ in range(request.num_choices)
        ]
        if self._ids is None and seen is None:
            return
        digest = prepared[0].digest
        if seen is not None and (seen.head.digest != digest or len(prepared) != 1):
            raise InvalidRequest(f"{param} belongs to another request", param=param)
        self._head = StreamHead(
            request_id=request.request_id,
            seed=request.sampling.seed & _SEED_MASK,
            created_s=int(clock()) if seen is None else seen.head.created_s,
            digest=digest,
            resumptions=request.resumptions,
        )

    @property
    def is_continued(self) -> bool:
        """Whether the client has the beginning of the stream."""
        return self._seen is not None

    @property
    def has_all(self) -> bool:
        """Whether the client has everything but the end mark, including usage if it requested that."""
        return self._seen is not None and self._seen.usage_sent

    @property
    def num_tokens_shown(self) -> int:
        """Tokens that the client had when this call began."""
        return 0 if self._seen is None else sum(choice.num_tokens for choice in self._seen.choices)

    def has_ended(self, index: int) -> bool:
        """Whether the client has the end of that choice, so that it is not sent again."""
        return bool(self._choices) and self._choices[index % len(self._choices)].ended

    def moved(self, delta: TextDelta) -> None:
        """Advance past `delta`, which is about to be sent; its finish is counted by `id_of`."""
        if self._ids is not None:
            at = self._choices[delta.choice_index]
            at.num_tokens += len(delta.tokens)
            at.num_chars += len(delta.text)
            at.worker = delta.worker or at.worker

    def begun(self, delta: TextDelta) -> None:
        """Note the worker of the first tokens, before an event that has none of them."""
        if self._ids is not None:
            at = self._choices[delta.choice_index]
            at.worker = delta.worker or at.worker

    @property
    def has_ids(self) -> bool:
        """Whether events have ids."""
        return self._ids is not None

    def text_id(self, choice_index: int, text: str) -> bytes | None:
        """Advance past a token with its text, from the worker of the tokens before, and return its event's id."""
        if self._ids is None:
            return None
        at = self._choices[choice_index]
        at.num_tokens += 1
        at.num_chars += len(text)
        return self._ids.write(self._head, self._choices)

    def id_of(self, *, ended: Collection[int] = (), usage_sent: bool = False) -> bytes | None:
        """Return the id of the event about to be sent, with the choices that end in it, or the usage."""
        if self._ids is None:
            return None
        for index in ended:
            self._choices[index].ended = True
        return self._ids.write(self._head, self._choices, usage_sent=usage_sent)
