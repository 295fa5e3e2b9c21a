"""Guides by llguidance: an Earley parser over derivatives of regular expressions, some 10 us a token.

https://github.com/guidance-ai/llguidance. Imported lazily: a worker without it refuses grammars. Its messages quote
what was generated, so nothing of them is logged or told.
"""

import hashlib
import importlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.guide import Bits
from tandem.errors import ConfigError, InvalidRequest
from tandem.regular_file import read_regular_text

_MAX_COMPILED = 128
"""Grammars kept; one in use is shared with those who use it."""
_MAX_FILE_BYTES = 256 << 20
_SILENT = 0


class LlGuide:
    """See TokenGuide."""

    def __init__(self, matcher: Any, end_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        self._has_ended = False
        self._bits: Bits | None = None
        self._address = 0
        self.num_tokens = 0
        self.has_refused = False

    @property
    def is_over(self) -> bool:
        """See TokenGuide."""
        return self._has_ended or bool(self._matcher.is_stopped())

    def allow(self, bits: Bits) -> None:
        """See TokenGuide. A parser that has given up allows ends only, none of which it will accept."""
        if bits is not self._bits:  # the same for as long as a batch stays together; asking numpy is slow
            self._bits, self._address = bits, int(bits.ctypes.data)
        self._matcher.unsafe_compute_mask_ptr(self._address, bits.nbytes)

    def accept(self, token_id: int) -> bool:
        """See TokenGuide."""
        if token_id in self._end_token_ids:
            accepted = self._has_ended = bool(self._matcher.is_accepting())
        else:
            accepted = not self._has_ended and bool(self._matcher.consume_token(token_id))
        self.num_tokens += accepted
        self.has_refused = not accepted or bool(self._matcher.is_error())
        return not self.has_refused


class LlGuides:
    """See Guides."""

    def __init__(self, tokenizer: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """`tokenizer`: a tokenizer.json, read when the first grammar comes. `vocab_size`: of the model's logits."""
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._compiled: OrderedDict[bytes, Any] = OrderedDict()

    def guide(self, grammar: str) -> LlGuide:
        """See Guides."""
        key = hashlib.sha256(grammar.encode()).digest()
        with self._lock:
            matcher = self._compiled.get(key)
            if matcher is not None:
                self._compiled.move_to_end(key)
        if matcher is None:
            matcher = self._compile(grammar)
            with self._lock:
                self._compiled[key] = matcher
                while len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
        return LlGuide(matcher.deep_copy(), frozenset(self._end_token_ids))

    def _compile(self, grammar: str) -> Any:
        try:
            llguidance = importlib.import_module("llguidance")
        except ImportError:
            raise InvalidRequest("grammar: this worker has no llguidance", param="grammar") from None
        matcher = llguidance.LLMatcher(self._loaded(llguidance), grammar, log_level=_SILENT)
        if matcher.is_error():
            raise InvalidRequest("grammar: it cannot be compiled", param="grammar")
        return matcher

    def _loaded(self, llguidance: Any) -> Any:
        with self._lock:
            if self._tokenizer is None:
                try:
                    text = read_regular_text(self._path, max_bytes=_MAX_FILE_BYTES)
                    ends = list(self._end_token_ids) or None
                    self._tokenizer = llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=ends)
                except (ConfigError, ValueError) as error:
                    reason = type(error).__name__
                    raise InvalidRequest(f"grammar: this model's tokenizer is of no use ({reason})") from None
            return self._tokenizer
