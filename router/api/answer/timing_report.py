"""The times by phase and the cost of a call, as both the HTTP and the gRPC server report them. Pure.

Phases follow each other: together they are no longer than the call; the rest belongs to the network, to threads that
were waited for, and to attempts that never reported back.
"""

from typing import Any

from router.api.answer.usage import CallUsage

SERVER_TIMING = "server-timing"
"""HTTP header, and key in gRPC's trailing metadata; the format is W3C's Server-Timing, in milliseconds."""

TIMING = "tandem-timing"
"""Key in gRPC's trailing metadata of `timing_object` as JSON."""


def timing_object(usage: CallUsage) -> dict[str, Any]:
    """Return seconds by phase of the slowest choice, and cached tokens and cost of all."""
    spent = usage.spent()
    return {
        **{f"{name}_s": round(seconds, 6) for name, seconds in _phases(usage).items()},
        "cached_tokens": usage.cached_tokens,
        "cached_by_source": usage.cached_by_source()._asdict(),
        "retry_amplification": round(spent.retry_amplification, 6),
        "cost": {
            "prefill_s": round(spent.prefill_s, 6),
            "decode_s": round(spent.decode_s, 6),
            "kv_byte_s": round(spent.kv_byte_s, 3),
            "amount": round(usage.prices.amount(spent), 9),
            "currency": usage.prices.currency,
        },
    }


def server_timing(usage: CallUsage) -> str:
    """Format the phases as one Server-Timing header."""
    return ", ".join(f"{name};dur={1000 * seconds:.3f}" for name, seconds in _phases(usage).items())


def _phases(usage: CallUsage) -> dict[str, float]:
    times = usage.times()
    return {
        "queue": times.router_queue_s + times.prefill_queue_s,
        "prefill": times.prefill_s,
        "transfer": times.transfer_s,
        "decode_queue": times.decode_queue_s,
        "decode": times.decode_s,
        "other": max(0.0, usage.elapsed_s - times.total_s),
        "total": usage.elapsed_s,
    }
