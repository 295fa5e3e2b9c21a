"""What a single request may ask for, and when it has had it."""

from engine.config import EngineConfig
from engine.request import FinishReason, Request
from tandem.errors import ContextLengthExceeded, InvalidRequest, RequestTooLarge


def check_size(request: Request, config: EngineConfig) -> None:
    """Refuse at once what could never run, however long it waited.

    The least that a request needs is its tokens and one more, or its prompt and `min_tokens`; `max_tokens` beyond
    the context or the pool is no error, the output then ends there with reason "length".
    Raises InvalidRequest, ContextLengthExceeded, RequestTooLarge.
    """
    if not 1 <= request.num_prompt_tokens <= request.num_tokens:
        raise InvalidRequest("the prompt is empty", param="prompt")
    least = max(request.num_tokens + 1, request.num_prompt_tokens + request.params.min_tokens)
    if least > config.max_model_len:
        raise ContextLengthExceeded(
            f"the model's context is {config.max_model_len} tokens; this needs at least {least} "
            f"({request.num_prompt_tokens} of them in the prompt)",
            param="prompt",
        )
    if least > config.max_sequence_tokens:
        raise RequestTooLarge(
            f"the whole KV pool holds {config.max_sequence_tokens} tokens; this needs at least {least}", param="prompt"
        )


def finish_reason(request: Request, config: EngineConfig) -> FinishReason | None:
    """Why the request ends with its last token, or None when it goes on."""
    params, num_output = request.params, request.num_output_tokens
    if num_output < 1:
        return None
    last = request.token_ids[-1]
    if num_output >= params.min_tokens and (
        last in params.stop_token_ids or (not params.ignore_eos and last in config.eos_token_ids)
    ):
        return FinishReason.STOP
    if num_output >= params.max_tokens or request.num_tokens >= config.max_sequence_tokens:
        return FinishReason.LENGTH
    return None
