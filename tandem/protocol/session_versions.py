"""Versions of the session protocol between routers and workers: which are supported, and what each one added. Pure.

A new kind of message, or a new value of an enumeration that the session carries, raises `SPOKEN.newest` and is listed
here. 3: EndEarlierSessions, ScorePrompt, PromptScores, Pin, Unpin, PinResult. 4: HELLO has a range of versions.
5: Submit has the prompt as bytes. 6: ScorePrompt says how to pool, and may ask for the log probabilities of labels.
7: Submit and ScorePrompt may name a LoRA adapter.
"""

from collections.abc import Iterable, Mapping

from tandem.protocol.version_negotiation import Dialect, VersionRange

SPOKEN = VersionRange(oldest=3, newest=7)
PROMPT_BYTES_SINCE = 5
"""The first version whose Submit has `prompt` in place of `prompt_token_ids`."""
POOLING_SINCE = 6
"""The first version whose ScorePrompt has `pooling` and `label_token_ids`: before it, the mean is what one gets."""
ADAPTERS_SINCE = 7
"""The first version whose Submit and ScorePrompt have `adapter`: a worker before it would answer without one."""

DIRECT_TICKET_BYTES = 16
"""Size of the ticket with which a session goes on at a worker's direct port."""

LOAD_PERIOD_S = 0.25
"""Period of a worker's load reports, unless a router with many workers asks for fewer: at most half of the least
silence after which a router gives a worker up (`router.worker_silence_s`)."""
MOST_LOAD_PERIOD_S = 0.5
"""The longest period that a worker agrees to."""


def _since(kinds: Mapping[int, Iterable[str]]) -> dict[str, int]:
    return {kind: version for version, added in kinds.items() for kind in added}


ROUTER_KINDS = _since(
    {
        2: (
            "hello",
            "submit",
            "cancel",
            "reroute",
            "fetch_cache",
            "cache_offer_ended",
            "take_over",
            "resync",
            "orders",
        ),
        3: ("end_earlier_sessions", "score_prompt", "pin", "unpin"),
    }
)
"""Kinds of RouterMessage, with the version that added each."""
WORKER_KINDS = _since(
    {
        2: (
            "hello",
            "tokens",
            "refused",
            "transfer_failed",
            "kv_events",
            "load",
            "draining",
            "cache_offer",
            "cache_fetched",
        ),
        3: ("prompt_scores", "pin_result"),
    }
)
"""Kinds of WorkerMessage, with the version that added each."""


def router_dialect(version: int) -> Dialect:
    """Kinds that a router may send in a session of this version."""
    return Dialect(version, ROUTER_KINDS)


def worker_dialect(version: int) -> Dialect:
    """Kinds that a worker may send in a session of this version."""
    return Dialect(version, WORKER_KINDS)
