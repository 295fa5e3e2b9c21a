"""The usage of a call, as JSON."""

from typing import Any

from router.api.answer.usage import CallUsage


def usage_object(usage: CallUsage) -> dict[str, Any]:
    accepted, rejected = usage.prediction
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }
