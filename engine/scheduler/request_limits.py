"""Limits of a single request, and when they end it."""

from engine.types.config import SchedulerConfig
from engine.types.request import EndRule, FinishReason, Request
from tandem.errors import ContextLengthExceeded, InvalidRequest, RequestTooLarge


def check_size(request: Request, config: SchedulerConfig) -> None:
    """Refuse a request that could never run, however long it waited.

    The least length of a request is its tokens and one more, or its prompt and `min_tokens`; prompt scoring alone needs
    no more than its tokens. `max_tokens` beyond the context or the pool is no error: the output then ends there with
    reason "length". Raises InvalidRequest, ContextLengthExceeded, RequestTooLarge.
    """
    if not 1 <= request.num_prompt_tokens <= request.num_tokens:
        raise InvalidRequest("the prompt is empty", param="prompt")
    least = max(request.num_tokens + (request.scoring is None), request.num_prompt_tokens + request.params.min_tokens)
    if least > config.max_model_len:
        raise ContextLengthExceeded(
            f"the model's context is {config.max_model_len} tokens; this request needs at least {least} "
            f"({request.num_prompt_tokens} of them in the prompt)",
            param="prompt",
        )
    if least > config.max_sequence_tokens:
        raise RequestTooLarge(
            f"the whole KV pool holds {config.max_sequence_tokens} tokens; this request needs at least {least}",
            param="prompt",
        )


def end_rule(request: Request, config: SchedulerConfig) -> EndRule:
    """The request's stop conditions as an EndRule, against which each token is checked."""
    params = request.params
    stops = frozenset(params.stop_token_ids)
    return EndRule(
        token_ids=stops if params.ignore_eos else stops | config.eos_token_ids,
        min_tokens=request.num_prompt_tokens + max(1, params.min_tokens),
        max_tokens=max(
            request.num_prompt_tokens + 1,
            min(request.num_prompt_tokens + params.max_tokens, config.max_sequence_tokens),
        ),
    )


def finish_reason(request: Request, config: SchedulerConfig) -> FinishReason | None:
    """Reason for which the request ends with its last token; None when it goes on."""
    if request.num_output_tokens < 1:
        return None
    return reason_of(request.end_rule or end_rule(request, config), request.token_ids[-1], request.num_tokens)


def reason_of(rule: EndRule, last_token: int, num_tokens: int) -> FinishReason | None:
    """Reason for which a sequence of `num_tokens` tokens, the last of them output, ends; None when it goes on."""
    if last_token in rule.token_ids and num_tokens >= rule.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_tokens >= rule.max_tokens else None
