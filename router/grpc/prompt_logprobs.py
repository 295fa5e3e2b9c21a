"""Log probabilities of a prompt as messages of the public gRPC door."""

from collections.abc import Callable, Sequence
from functools import partial

from router.types.prompt_scoring import ScoredPrompt
from tandem.v1 import common_pb2 as common
from tandem.v1 import inference_pb2 as pb

_VALUES_PER_MESSAGE = 2048
"""Made in one turn of the loop, and far below what clients take as one message."""


def prompt_responses(
    request_id: str, prompt: Sequence[int], reading: ScoredPrompt
) -> list[Callable[[], pb.GenerateResponse]]:
    """Each makes one response when it is about to be sent."""
    step = max(1, _VALUES_PER_MESSAGE // (1 + reading.num_top))
    return [
        partial(_response, request_id, prompt, reading, begin, min(begin + step, len(reading)))
        for begin in range(0, len(reading), step)
    ]


def _response(
    request_id: str, prompt: Sequence[int], reading: ScoredPrompt, begin: int, end: int
) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        id=request_id, prompt_logprobs=[_place(prompt[i + 1], reading, i) for i in range(begin, end)]
    )


def _place(own: int, reading: ScoredPrompt, index: int) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(
        token_id=own,
        logprob=reading.logprobs[index],
        rank=reading.ranks[index],
        top=[common.TokenLogprob(token_id=token_id, logprob=value) for token_id, value in reading.top(index)],
    )
