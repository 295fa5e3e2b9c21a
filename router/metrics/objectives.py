"""Whether one request went well, as goodput counts it. Pure."""

from enum import Enum

from tandem.config.telemetry import ObjectivesConfig
from tandem.errors import Code

_OURS = frozenset({Code.INTERNAL, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED})


class RequestVerdict(Enum):
    """What became of a request, the worst that can be said of it."""

    GOOD = "good"
    LATE_FIRST = "late_first"
    LATE_TOKENS = "late_tokens"
    REFUSED = "refused"
    FAILED = "failed"


def judge_request(
    objectives: ObjectivesConfig, code: Code | None, *, ttft_s: float | None, per_token_s: float | None
) -> RequestVerdict | None:
    """None where its client is who ended it, or asked for what cannot be: that says nothing of us.

    `code`: how it failed. `ttft_s`, `per_token_s`: None where there was no first token, or no second one.
    """
    if code in _OURS:
        return RequestVerdict.FAILED
    if code is Code.RESOURCE_EXHAUSTED:
        return RequestVerdict.REFUSED
    if code is not None:
        return None
    if ttft_s is not None and ttft_s > objectives.ttft_s:
        return RequestVerdict.LATE_FIRST
    if per_token_s is not None and per_token_s > objectives.per_token_s:
        return RequestVerdict.LATE_TOKENS
    return RequestVerdict.GOOD
