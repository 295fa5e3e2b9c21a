"""Guides by llguidance: an Earley parser over derivatives of regular expressions, some 10 us a token.

https://github.com/guidance-ai/llguidance. Imported lazily: a worker without it refuses grammars. Its messages quote
generated text, so they are neither logged nor returned.
"""

import hashlib
import importlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from itertools import pairwise
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np

from engine.types.token_guide import Bits, num_words
from tandem.errors import ConfigError, InvalidRequest
from tandem.model_files import read_model_text
from tandem.values.grammar_bounds import (
    LIMITS,
    ParserTime,
    most_bytes,
    random_walk_error,
    tokenizer_for_guides,
    unforced,
)

_MAX_CACHE_BYTES = 1 << 30
_CACHE_SHARE = 8
"""Divisor of a worker's memory limit that bounds the cache of compiled grammars."""
_MAX_FOLLOWED_TOKENS = 1 << 14
"""Tokens followed with one compiled grammar, after which it is compiled anew: its state grows as it is used."""
_NUM_PATHS, _NUM_TOKENS = 2, 4
_MAX_PREFIXES = 8
"""Allowed tokens up to which they may be the beginnings of one forced text; more are a choice."""
_MAX_FILE_BYTES = 256 << 20
_SILENT = 0
_NOT_ALLOWED = "doesn't satisfy the grammar"
"""Part of llguidance's message for a token that may not come next; other errors are exceeded limits."""


def grammar_cache_bytes(limit_bytes: int) -> int:
    """Size of the cache of compiled grammars, in bytes, of a worker whose memory limit is `limit_bytes`."""
    return min(_MAX_CACHE_BYTES, limit_bytes // _CACHE_SHARE)


class _Compiled:
    """One grammar's matcher, copied for each answer; copies share what any of them has computed."""

    def __init__(self, key: bytes, matcher: Any, size_bytes: int) -> None:
        self.key = key
        self.matcher = matcher
        self.size_bytes = size_bytes
        self.num_followed_tokens = 0


class LlGuide:
    """Follows one answer with a copy of a compiled grammar's matcher."""

    def __init__(
        self,
        compiled: _Compiled,
        end_token_ids: frozenset[int],
        time: ParserTime,
        on_fault: Callable[[_Compiled], None],
        piece: Callable[[int], bytes],
    ) -> None:
        """`on_fault`: called when the matcher fails or is too costly, which may be due to state shared with its
        copies. `piece`: the bytes of a token.
        """
        self._compiled = compiled
        self._matcher = compiled.matcher.deep_copy()
        self._end_token_ids = end_token_ids
        self._time = time
        self._on_fault = on_fault
        self._piece = piece
        self._has_ended = False
        self._bits: Bits | None = None
        self._address = 0
        self.num_tokens = 0
        self.has_refused = False
        self.is_too_costly = False

    @property
    def is_over(self) -> bool:
        return self._has_ended or bool(self._matcher.is_stopped())

    def allow(self, bits: Bits) -> None:
        """See TokenGuide. A failed parser allows end tokens only, none of which `accept` accepts."""
        if bits is not self._bits:  # the same array while a batch stays together; numpy's look-up is slow
            self._bits, self._address = bits, int(bits.ctypes.data)
        begun_s = thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._address, bits.nbytes)
        self._time.add(thread_time() - begun_s)

    def accept(self, token_id: int) -> bool:
        begun_s = thread_time()
        if token_id in self._end_token_ids:
            accepted = self._has_ended = bool(self._matcher.is_accepting())
        else:
            accepted = not self._has_ended and bool(self._matcher.consume_token(token_id))
        self._time.add(thread_time() - begun_s)
        self.num_tokens += accepted
        self._compiled.num_followed_tokens += accepted
        is_error = bool(self._matcher.is_error())
        hit_limit = is_error and _NOT_ALLOWED not in self._matcher.get_error()
        self.is_too_costly = not self._time.end_token() or hit_limit
        self.has_refused = not accepted or is_error or self.is_too_costly
        if is_error or self.is_too_costly:
            self._on_fault(self._compiled)
        return not self.has_refused

    def fork(self) -> "LlGuide":
        """See TokenGuide. A copied matcher takes some 2 us. Its faults count for nothing: they may be a draft's."""
        ahead = copy(self)
        ahead._matcher = self._matcher.deep_copy()
        ahead._time = copy(self._time)
        ahead._on_fault = _ignore
        ahead._bits = None
        return ahead

    def forced(self, most: int) -> Sequence[int]:
        """See TokenGuide. Bytes are forced where each allowed token begins the next; the longest is drafted.

        Not by llguidance's own search for forced bytes, which may not end (`tandem.values.grammar_bounds.unforced`).
        """
        ahead, bits = self.fork(), np.zeros(num_words(self._time.vocab_size), dtype=np.int32)
        found: list[int] = []
        while len(found) < most and not ahead.is_over:
            bits.fill(0)
            ahead.allow(bits)
            token_id = self._only_way(bits)
            if token_id is None or not ahead.accept(token_id):
                break
            found.append(token_id)
        return found

    def _only_way(self, bits: Bits) -> int | None:
        """The longest of the allowed tokens if all begin alike; None when there is a choice, or an end."""
        words = np.flatnonzero(bits)
        if not 0 < len(words) <= _MAX_PREFIXES:
            return None
        chosen = bits[words].view(np.uint32).tolist()
        if sum(map(int.bit_count, chosen)) > _MAX_PREFIXES:
            return None
        tokens = [
            32 * word + bit
            for word, value in zip(words.tolist(), chosen, strict=True)
            for bit in range(32)
            if value >> bit & 1
        ]
        if not self._end_token_ids.isdisjoint(tokens):
            return None
        pieces = sorted((self._piece(token_id), token_id) for token_id in tokens)
        if all(longer.startswith(shorter) for (shorter, _), (longer, _) in pairwise(pieces)):
            return pieces[-1][1]
        return None


def _ignore(_compiled: _Compiled) -> None:
    """Do nothing about the fault of a fork."""


class LlGuides:
    """Compiles grammars and caches them, up to a number of bytes."""

    def __init__(self, tokenizer: Path, *, vocab_size: int, eos_token_ids: Sequence[int], cache_bytes: int) -> None:
        """`tokenizer`: a tokenizer.json, read at the first grammar. `vocab_size`: of the model's logits.

        `cache_bytes`: size of the cache of compiled grammars. Each counts with the most memory that it may use
        (see `tandem.values.grammar_bounds`), since its current use cannot be measured.
        """
        self._path = tokenizer
        self._vocab_size = vocab_size
        self._end_token_ids = tuple(eos_token_ids)
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._pieces: dict[int, bytes] = {}
        self._kept: OrderedDict[bytes, _Compiled] = OrderedDict()
        self.kept_bytes = 0

    def cached_guide(self, grammar: str) -> LlGuide | None:
        key = _key(grammar)
        with self._lock:
            compiled = self._kept.get(key)
            if compiled is None:
                return None
            if compiled.num_followed_tokens > _MAX_FOLLOWED_TOKENS:
                self._drop(compiled)
                return None
            self._kept.move_to_end(key)
        return self._guide(compiled)

    def guide(self, grammar: str) -> LlGuide:
        guide = self.cached_guide(grammar)
        if guide is None:
            compiled = self._compile(grammar)
            self._keep(compiled)
            guide = self._guide(compiled)
        return guide

    def _guide(self, compiled: _Compiled) -> LlGuide:
        time = ParserTime(self._vocab_size)
        return LlGuide(compiled, frozenset(self._end_token_ids), time, self._forget, self._piece)

    def _piece(self, token_id: int) -> bytes:
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = bytes(self._tokenizer.decode_bytes([token_id]))
        return found

    def _keep(self, compiled: _Compiled) -> None:
        with self._lock:
            if compiled.size_bytes > self._cache_bytes:
                return
            if (other := self._kept.get(compiled.key)) is not None:
                self._drop(other)
            while self._kept and self.kept_bytes + compiled.size_bytes > self._cache_bytes:
                self._drop(next(iter(self._kept.values())))
            self._kept[compiled.key] = compiled
            self.kept_bytes += compiled.size_bytes

    def _forget(self, compiled: _Compiled) -> None:
        """Drop a grammar whose shared lexer has failed, so that the next request compiles it anew."""
        with self._lock:
            if self._kept.get(compiled.key) is compiled:
                self._drop(compiled)

    def _drop(self, compiled: _Compiled) -> None:
        del self._kept[compiled.key]
        self.kept_bytes -= compiled.size_bytes

    def _compile(self, grammar: str) -> _Compiled:
        """Compile a grammar and compute its first masks, which take longest and would delay the engine.

        Raises InvalidRequest.
        """
        try:
            llguidance = importlib.import_module("llguidance")
        except ImportError:
            raise InvalidRequest("grammar: this worker has no llguidance", param="grammar") from None
        limits = llguidance.LLParserLimits(**LIMITS)
        text = unforced(grammar)
        matcher = llguidance.LLMatcher(self._loaded(llguidance), text, log_level=_SILENT, limits=limits)
        if matcher.is_error():
            raise InvalidRequest("grammar: cannot be compiled", param="grammar")
        if random_walk_error(matcher, self._end_token_ids, num_paths=_NUM_PATHS, num_tokens=_NUM_TOKENS):
            raise InvalidRequest("grammar: too expensive to evaluate", param="grammar")
        return _Compiled(_key(grammar), matcher, most_bytes(grammar))

    def _loaded(self, llguidance: Any) -> Any:
        with self._lock:
            if self._tokenizer is None:
                try:
                    text = tokenizer_for_guides(read_model_text(self._path, max_bytes=_MAX_FILE_BYTES))
                    ends = list(self._end_token_ids) or None
                    self._tokenizer = llguidance.LLTokenizer(text, n_vocab=self._vocab_size, eos_token=ends)
                except (ConfigError, ValueError) as error:
                    reason = type(error).__name__
                    raise InvalidRequest(f"grammar: this model's tokenizer cannot be used ({reason})") from None
            return self._tokenizer


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()
