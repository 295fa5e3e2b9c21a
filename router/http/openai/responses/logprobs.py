"""Log probabilities of a response's text: of what the model thinks there are none."""

from typing import Any

from router.api.answer.choice_text import TextDelta
from router.api.request.client_request import Prepared
from router.http.openai.logprobs import Logprobs
from router.text.tokenizer import Tokenizer
from tandem.values.outputs import SampledToken


class ResponseLogprobs:
    """Of one answer, as its tokens come."""

    def __init__(self, prepared: Prepared, tokenizer: Tokenizer) -> None:
        self.are_shown = prepared.request.sampling.num_logprobs is not None
        self._shape = Logprobs(tokenizer)
        self._thoughts = None if prepared.reasoning is None else prepared.reasoning.new_counter()
        self._held: list[SampledToken] = []
        """It is not known yet whether they are thinking."""

    def of(self, delta: TextDelta) -> list[dict[str, Any]]:
        """Of the delta's tokens, and of those that turn out to be text."""
        if not self.are_shown:
            return []
        shown = [token for token in delta.tokens for token in self._known(token)]
        if delta.finish is not None and self._thoughts is not None and not self._thoughts.has_thought:
            shown += self._held
            self._held = []
        return self._shape.entries(shown)

    def _known(self, token: SampledToken) -> list[SampledToken]:
        thoughts = self._thoughts
        if thoughts is None or thoughts.has_ended:
            return [token]
        thoughts.add([token.token_id])
        held, self._held = [*self._held, token], []
        if not thoughts.has_ended and not thoughts.has_thought:
            self._held = held
            return []
        return [] if thoughts.has_thought else held
