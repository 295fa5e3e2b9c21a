"""What a call used, as JSON shows it."""

from typing import Any

from router.usage import Usage


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def timing_object(usage: Usage) -> dict[str, Any]:
    """Seconds by phase, measured by the workers."""
    times = usage.times()
    return {
        "queue_s": round(times.prefill_queue_s + times.decode_queue_s, 6),
        "prefill_s": round(times.prefill_s, 6),
        "transfer_s": round(times.transfer_s, 6),
        "decode_s": round(times.decode_s, 6),
        "cached_tokens": usage.cached_tokens,
    }
