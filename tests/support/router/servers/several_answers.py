"""A generator whose choices differ: for what picks some of them."""

from collections.abc import AsyncGenerator

from router.text.tokenizer import Tokenizer
from router.types.requests import ChoiceDelta, ChoiceFinish, RoutedRequest
from tandem.values.outputs import FinishReason, SampledToken
from tests.support.router.servers import fakes

TEXTS = ["it is 5", "so: 7 ", " 5", "who knows", "7"]
LOGPROBS = [-3.0, -1.0, -2.0, -1.0, -9.0]


class Various(fakes.FakeGenerator):
    """Each choice says something else, with a log probability of its own for all of it."""

    tokenizer: Tokenizer

    async def generate(self, request: RoutedRequest) -> AsyncGenerator[ChoiceDelta, None]:
        self.requests.append(request)
        if request.scoring is not None:
            yield ChoiceDelta(0, scored=fakes.scored_prompt_of(request))
        for index in range(request.num_choices):
            ids = self.tokenizer.encode(TEXTS[index % len(TEXTS)])
            share = LOGPROBS[index % len(TEXTS)] / len(ids) if request.sampling.num_logprobs is not None else None
            tokens = tuple(SampledToken(token_id=token, logprob=share) for token in ids)
            finish = ChoiceFinish(reason=FinishReason.STOP, cached_tokens=0, times=fakes.TIMES)
            yield ChoiceDelta(choice_index=index, tokens=tokens, finish=finish)


def size_of(tokenizer: Tokenizer) -> int:
    return sum(len(tokenizer.encode(text)) for text in TEXTS)
