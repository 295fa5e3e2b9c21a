"""Samples of a step on their way from the device to the host."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.runner.device_queue import DeviceQueue, Download
from engine.sampling.sampler import Chosen, RowLogprobs
from engine.types.request import SampledToken, TokenLogprob


@dataclass(frozen=True, slots=True, eq=False)
class _PendingLogprobs:
    wanted: RowLogprobs
    sampled: Download
    top_ids: Download
    top_values: Download


class PendingSamples:
    """Implements LaunchedStep for a step that samples."""

    __slots__ = ("_logprobs", "_token_ids")

    def __init__(self, queue: DeviceQueue, chosen: Chosen) -> None:
        """Begin the copies to the host, without waiting."""
        self._token_ids = queue.download(chosen.token_ids)
        self._logprobs = [
            _PendingLogprobs(found, *map(queue.download, (found.sampled, found.top_ids, found.top_values)))
            for found in chosen.logprobs
        ]

    def is_over(self) -> bool:
        return self._token_ids.is_here() and all(coming.top_values.is_here() for coming in self._logprobs)

    def tokens(self) -> Sequence[SampledToken | None]:
        ids = self._token_ids.wait().tolist()
        tokens = [SampledToken(token_id=token) if token >= 0 else None for token in ids]
        for coming in self._logprobs:
            _add_logprobs(tokens, coming)
        return tokens


class ComingKeys:
    """Implements LaunchedStep for a step that only fills the cache."""

    __slots__ = ("_done",)

    def __init__(self, queue: DeviceQueue) -> None:
        self._done = queue.mark()

    def is_over(self) -> bool:
        return self._done.has_passed()

    def tokens(self) -> Sequence[SampledToken | None]:
        self._done.wait()
        return []


def _add_logprobs(tokens: list[SampledToken | None], coming: _PendingLogprobs) -> None:
    """Add log probabilities, in place, to the tokens whose requests want them."""
    sampled, top_ids, top_values = (
        part.wait().tolist() for part in (coming.sampled, coming.top_ids, coming.top_values)
    )
    for i, (row, num_top) in enumerate(zip(coming.wanted.rows, coming.wanted.num_top, strict=True)):
        token = tokens[row]
        if token is not None:
            pairs = zip(top_ids[i][:num_top], top_values[i][:num_top], strict=True)
            tokens[row] = SampledToken(
                token_id=token.token_id,
                logprob=sampled[i],
                top_logprobs=tuple(TokenLogprob(token_id=t, logprob=v) for t, v in pairs),
            )
