"""Log probabilities of an answer's tokens, in OpenAI's formats."""

import math
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from router.text.tokenizer import Tokenizer
from tandem.errors import InternalError
from tandem.values.outputs import SampledToken

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot represent."""


class Logprobs(Struct, frozen=True):
    """Formats log probabilities for chat and completions."""

    tokenizer: Tokenizer
    as_ids: bool = False
    """Whether tokens are named `token_id:123`, as in vLLM, since several tokens may have equal texts."""

    def chat(self, tokens: Sequence[SampledToken]) -> dict[str, Any] | None:
        """Format for chat; None when the request did not ask for any."""
        content = self.entries(tokens)
        return {"content": content, "refusal": None} if content else None

    def entries(self, tokens: Sequence[SampledToken]) -> list[dict[str, Any]]:
        """Return one entry for each token whose log probability is known."""
        found = []
        for token in tokens:
            if token.logprob is not None:
                top = [self._entry(other.token_id, other.logprob) for other in token.top_logprobs]
                found.append(self._entry(token.token_id, token.logprob) | {"top_logprobs": top})
        return found

    def completion(self, tokens: Sequence[SampledToken], offset: int) -> tuple[dict[str, Any] | None, int]:
        """Format for completions; return the object, and the text offset after it."""
        known = [token for token in tokens if token.logprob is not None]
        if not known:
            return None, offset
        texts = [self.text(token.token_id) for token in known]
        offsets = [offset]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        logprobs = {
            "tokens": [self.name(token.token_id) for token in known] if self.as_ids else texts,
            "token_logprobs": [finite(token.logprob or 0.0) for token in known],
            "top_logprobs": [{self.name(t.token_id): finite(t.logprob) for t in token.top_logprobs} for token in known],
            "text_offset": offsets[:-1],
        }
        return logprobs, offsets[-1]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self.tokenizer.bytes_of(token_id)
        name = f"token_id:{token_id}" if self.as_ids else data.decode(errors="replace")
        return {"token": name, "logprob": finite(logprob), "bytes": list(data)}

    def name(self, token_id: int) -> str:
        """Return the name of one token."""
        return f"token_id:{token_id}" if self.as_ids else self.text(token_id)

    def text(self, token_id: int) -> str:
        """Return the text of one token."""
        return self.tokenizer.bytes_of(token_id).decode(errors="replace")


def finite(logprob: float) -> float:
    """Return a number that JSON can represent. Raises InternalError for NaN."""
    if math.isnan(logprob):
        raise InternalError("a log probability is not a number")
    return max(logprob, LEAST_LOGPROB)
