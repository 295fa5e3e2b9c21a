"""Where one streamed answer is, said with each of its events to clients that ask for it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from router.frontend import Prepared
from router.stream_ids import LAST_EVENT_ID, MAX_CHOICES, ChoicePosition, StreamHead, StreamIds, StreamPosition
from router.text_stream import TextDelta
from tandem.errors import InvalidRequest

IDS_HEADER = "X-Tandem-Stream-Ids"
"""`1` asks for an `id` with each event. Not unasked: some readers of streams know `data` lines only."""
_SEED_MASK = (1 << 64) - 1


def last_seen(request: Request, ids: StreamIds) -> StreamPosition | None:
    """Where a stream that this call continues broke. Raises InvalidRequest for an id that is not ours."""
    text = request.headers.get(LAST_EVENT_ID, "")
    return ids.read(text) if text else None


def wants_ids(request: Request) -> bool:
    """Whether the client can go on from an id, or already does."""
    return request.headers.get(IDS_HEADER) == "1" or LAST_EVENT_ID in request.headers


class StreamCursor:
    """Moves with the events of one stream."""

    def __init__(
        self,
        prepared: Sequence[Prepared],
        ids: StreamIds | None,
        seen: StreamPosition | None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Without `ids`, or for more choices than an id holds, events have none.

        Raises InvalidRequest when `seen` belongs to another request.
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
            raise InvalidRequest(f"{LAST_EVENT_ID} belongs to another request", param=LAST_EVENT_ID)
        self._head = StreamHead(
            request_id=request.request_id,
            seed=request.sampling.seed & _SEED_MASK,
            created_s=int(clock()) if seen is None else seen.head.created_s,
            digest=digest,
            resumptions=request.resumptions,
        )

    @property
    def is_continued(self) -> bool:
        """Whether the client has the beginning."""
        return self._seen is not None

    @property
    def has_all(self) -> bool:
        """Whether the client has everything but the end mark, usage included where it asked for it."""
        return self._seen is not None and self._seen.usage_sent

    @property
    def num_tokens_shown(self) -> int:
        """Tokens that the client had when this call began."""
        return 0 if self._seen is None else sum(choice.num_tokens for choice in self._seen.choices)

    def has_ended(self, index: int) -> bool:
        """Whether the client has the end of that choice, so that it is not sent again."""
        return bool(self._choices) and self._choices[index % len(self._choices)].ended

    def moved(self, delta: TextDelta) -> None:
        """What `delta` shows is about to be sent; its finish is counted by `id_of`."""
        if self._ids is not None:
            at = self._choices[delta.choice_index]
            at.num_tokens += len(delta.tokens)
            at.num_chars += len(delta.text)
            at.worker = delta.worker or at.worker

    @property
    def has_ids(self) -> bool:
        """Whether events have ids."""
        return self._ids is not None

    def text_id(self, delta: TextDelta) -> bytes | None:
        """As `moved`, and the id of the event that carries the delta's text and no end."""
        self.moved(delta)
        return None if self._ids is None else self._ids.write(self._head, self._choices)

    def id_of(self, chunk: dict[str, Any]) -> bytes | None:
        """The id of the event that carries `chunk`."""
        if self._ids is None:
            return None
        for choice in chunk["choices"]:
            if choice["finish_reason"] is not None:
                self._choices[choice["index"]].ended = True
        return self._ids.write(self._head, self._choices, usage_sent=not chunk["choices"])
