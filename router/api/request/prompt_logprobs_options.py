"""Prompt logprobs options: parses and checks them, for HTTP and gRPC alike."""

from collections.abc import Sequence

from router.api.request.client_request import PreparedRequest
from router.types.prompt_logprobs import PromptScoringRequest
from tandem.errors import InvalidRequest
from tandem.values.sampling import MAX_TOP_LOGPROBS


def parse_prompt_scoring(
    *,
    prompt_logprobs: int | None,
    echoed_logprobs: int | None = None,
    streams: bool,
    max_tokens: int | None,
    echo: bool,
) -> PromptScoringRequest | None:
    """Parse the options; None: none requested. `echoed_logprobs`: requested for a prompt that is echoed with its
    answer.

    Raises InvalidRequest for log probabilities that cannot be returned, or not in a stream.
    """
    if prompt_logprobs is not None and not 0 <= prompt_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"prompt_logprobs must be an integer in [0, {MAX_TOP_LOGPROBS}]", param="prompt_logprobs")
    counts = [count for count in (prompt_logprobs, echoed_logprobs) if count is not None]
    only = max_tokens == 0 and (echo or bool(counts))
    if streams and (counts or only):
        param = "prompt_logprobs" if prompt_logprobs is not None else "echo"
        raise InvalidRequest(f"{param}: log probabilities of a prompt are not streamed", param=param)
    return PromptScoringRequest(num_top=max(counts, default=0), only=only) if counts or only else None


def check_prompt_scoring_size(prepared: Sequence[PreparedRequest], most: int) -> None:
    """Check the size of the result. Raises InvalidRequest when a call's prompt log probabilities would exceed the
    bound."""
    values = sum(
        len(one.request.prompt_token_ids) * one.request.num_choices * (2 + asked.num_top)
        for one in prepared
        if (asked := one.request.scoring) is not None and asked.num_top is not None and not asked.is_small
    )
    if values > most:
        raise InvalidRequest(
            f"prompt tokens x n x (2 + [prompt_]logprobs) must be at most {most}, got {values}",
            param="prompt",
        )


def check_call_tokens(num_tokens: int, most: int) -> None:
    """Check the prompts of a call that may have very many. Raises InvalidRequest."""
    if num_tokens > most:
        raise InvalidRequest(
            f"prompt: more than {most} tokens in one call (router.queue.max_tokens): send fewer or shorter texts",
            param="prompt",
        )
