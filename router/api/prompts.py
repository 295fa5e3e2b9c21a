"""Turns prompts as clients send them into token ids: bounded before they are read, long ones off the event loop."""

import asyncio
import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar
from weakref import WeakValueDictionary

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.api.request.client_request import ModelInfo
from router.text.conversation import MAX_MESSAGES as MAX_MESSAGES
from router.text.conversation import Message, TemplateOptions, check_messages
from router.text.encoded_prefixes import EncodedPrefixes
from router.text.tokenizer import LEAST_KNOWN_CHARS, Tokenizer, check_text
from router.text.tools import ToolUse
from tandem.errors import ContextLengthExceeded, InvalidRequest

MAX_CHARS_PER_TOKEN = 32
"""A prompt with more characters than this per token of context is refused unread: no real text compresses that well."""
MAX_PREDICTION_TOKENS = 32_768
"""Bound on the answer that a client expects (`prediction`)."""
_INLINE_CHARS = 4096  # about a millisecond of tokenizing; longer texts leave the event loop
T = TypeVar("T")


class FillMarks(NamedTuple):
    """Token ids of a fill-in-the-middle model: the text before the gap follows the first, the text after it the second,
    and the answer the third."""

    before: int
    after: int
    middle: int

    def prompt(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """Build the prompt for filling in what stands between two texts."""
        return [self.before, *before, self.after, *after, self.middle]


_FILL_SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Spellings of Qwen and CodeGemma, StarCoder, DeepSeek."""


def fill_marks(added_ids: Mapping[str, int]) -> FillMarks | None:
    """Find them among a tokenizer's added tokens, by text; None: its model was not trained to fill in."""
    for spelling in _FILL_SPELLINGS:
        if all(text in added_ids for text in spelling):
            return FillMarks(*(added_ids[text] for text in spelling))
    return None


class TokenizerThreads:
    """Threads that tokenize long texts and do nothing else: twice as many as processors, no tenant's more than half.

    So one tenant alone can keep every processor busy, and another's text waits for none of the first one's.
    """

    def __init__(self, most_of_tenant: int | None = None) -> None:
        """`most_of_tenant`: half of the number of threads; None: the number of processors."""
        self._most_of_tenant = most_of_tenant or os.cpu_count() or 1
        self._executor = ThreadPoolExecutor(2 * self._most_of_tenant, thread_name_prefix="tokenizer")
        # Alive while a text of the tenant has one or waits for it.
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, work: Callable[[], T], tenant: str) -> T:
        """Return what `work` returns in a thread. Raises what it raises."""
        turns = self._turns.get(tenant)
        if turns is None:
            turns = self._turns[tenant] = asyncio.Semaphore(self._most_of_tenant)
        await turns.acquire()
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)

        def on_end(ended: asyncio.Future[T]) -> None:
            turns.release()
            if not ended.cancelled():
                ended.exception()  # nobody may be there any more to see it

        running.add_done_callback(on_end)
        # A thread cannot be stopped: it is the tenant's until it ends, even if the caller leaves.
        return await asyncio.shield(running)


class PromptReader(Collector):
    """Reads prompts for one model; all servers share it. Exports how much of conversations need not be encoded."""

    def __init__(self, *, model: ModelInfo, tokenizer: Tokenizer, max_prompts: int, cache_bytes: int = 0) -> None:
        """`cache_bytes`: bound on the token ids of conversations' beginnings that are kept; 0: none are."""
        self._model = model
        self._tokenizer = tokenizer
        self._max_prompts = max_prompts
        self._known = EncodedPrefixes(max_bytes=cache_bytes) if cache_bytes else None
        self._threads = TokenizerThreads()
        self._tenant = ""
        self.max_chars = model.max_model_len * MAX_CHARS_PER_TOKEN
        """Bound on the characters of a text that is tokenized."""

    def for_tenant(self, tenant: str) -> Self:
        """Return this reader for the texts of one tenant: its long ones take only that tenant's part of the threads."""
        found = copy(self)
        found._tenant = tenant
        return found

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families with their current figures."""
        tokens = CounterMetricFamily(
            "tandem_tokenizer_cache_tokens",
            f"Tokens of conversations of at least {LEAST_KNOWN_CHARS} characters: known from a turn before, or encoded",
            labels=("source",),
        )
        held = GaugeMetricFamily("tandem_tokenizer_cache_bytes", "Memory in use for beginnings of conversations")
        if (known := self._known) is not None:
            tokens.add_metric(("known",), known.num_known_tokens)
            tokens.add_metric(("encoded",), known.num_encoded_tokens)
            held.add_metric((), known.num_bytes)
        yield from (tokens, held)

    def parse_prompts(self, value: Any, *, most: int | None = None) -> list[str | tuple[int, ...]]:
        """Parse the prompts of a completions request: text, several texts, token ids, or several lists of them.

        `most`: bound on their number, where that of a completions request does not apply. Stops at the first fault, so
        that a hostile list costs no more than reading it. Raises InvalidRequest.
        """
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not value:
            raise InvalidRequest("prompt must be a string, token ids, or a non-empty list of either", param="prompt")
        if isinstance(value[0], (str, list)):
            most = self._max_prompts if most is None else most
            if len(value) > most:
                raise InvalidRequest(f"prompt: at most {most} prompts", param="prompt")
            if not all(isinstance(item, type(value[0])) for item in value):
                raise InvalidRequest("prompt: texts and token ids cannot be mixed", param="prompt")
            return [item if isinstance(item, str) else self.parse_ids(item) for item in value]
        return [self.parse_ids(value)]

    def parse_ids(self, value: Sequence[Any], param: str = "prompt") -> tuple[int, ...]:
        """Check token ids against the model's vocabulary. Raises InvalidRequest or ContextLengthExceeded."""
        if not value:
            raise InvalidRequest(f"{param}: empty", param=param)
        if len(value) > self._model.max_model_len:
            raise self.too_long_error(len(value), param)
        for item in value:
            if type(item) is not int or not 0 <= item < self._model.vocab_size:
                raise InvalidRequest(f"{param}: token ids must be in [0, {self._model.vocab_size})", param=param)
        return tuple(value)

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode one text. Raises InvalidRequest or ContextLengthExceeded."""
        self.check_size(len(text), "prompt")
        if len(text) <= _INLINE_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await self._in_thread(partial(self._tokenizer.encode, text, add_special_tokens=add_special_tokens))

    async def encode_prediction(self, text: str) -> "array[int]":
        """Encode the answer that a client expects. Raises InvalidRequest."""
        most, param = MAX_PREDICTION_TOKENS, "prediction"
        if len(text) > most * MAX_CHARS_PER_TOKEN:
            raise InvalidRequest(f"{param} must have at most {most} tokens, got {len(text)} characters", param=param)
        check_text(text, param)
        encode = partial(self._tokenizer.encode, text, add_special_tokens=False)
        ids = encode() if len(text) <= _INLINE_CHARS else await self._in_thread(encode)
        if len(ids) > most:
            raise InvalidRequest(f"{param} must have at most {most} tokens, got {len(ids)}", param=param)
        return array("i", ids)

    async def encode_around(
        self, before: str | Sequence[int], after: str, add_special_tokens: bool = True
    ) -> list[int]:
        """Encode a prompt whose answer is followed by `after`. Raises InvalidRequest or ContextLengthExceeded."""
        if (marks := fill_marks(self._tokenizer.added_ids)) is None:
            raise InvalidRequest("suffix: this model's tokenizer has no fill-in-the-middle tokens", param="suffix")
        self.check_size(len(after), "suffix")
        own = await self.encode("") if add_special_tokens and isinstance(before, str) else []
        ids = await self.encode(before, False) if isinstance(before, str) else before
        return [*own, *marks.prompt(ids, await self.encode(after, False))]

    async def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: ToolUse | None = None,
        options: TemplateOptions = TemplateOptions(),  # noqa: B008  # frozen
        scope: str | None = None,
    ) -> list[int]:
        """Encode one conversation. Raises InvalidRequest or ContextLengthExceeded.

        `scope`: the salt under which what it begins with may be known, and will be from now on; None: it is not kept.
        """
        check_messages(messages)
        if options.continue_final or options.variables:
            options.check(messages)
        size = 0 if tools is None else tools.num_chars
        for message in messages:
            size += message.num_chars
        self.check_size(size, "messages")
        encode = partial(
            self._tokenizer.encode_chat,
            messages,
            tools=tools.tools if tools is not None else (),
            add_generation_prompt=add_generation_prompt,
            max_chars=4 * self.max_chars,
            options=options,
            known=None if scope is None else self._known,
            scope=scope or "",
        )
        if size <= _INLINE_CHARS and len(messages) <= 64:
            return encode()
        return await self._in_thread(encode)

    async def encode_pair(
        self, text: str, pair: str | None, *, add_special_tokens: bool, kept: int | None, param: str
    ) -> list[int]:
        """Encode a text, or a pair of texts, of which at most `kept` tokens stay; see `Tokenizer.encode_pair`.

        Raises InvalidRequest, ContextLengthExceeded.
        """
        if kept is not None:
            # What is cut need not be read.
            text, pair = text[: self.max_chars], None if pair is None else pair[: self.max_chars]
        size = len(text) + len(pair or "")
        self.check_size(len(text), param)
        self.check_size(len(pair or ""), param)
        encode = partial(
            self._tokenizer.encode_pair, text, pair, add_special_tokens=add_special_tokens, kept=kept, param=param
        )
        return encode() if size <= _INLINE_CHARS else await self._in_thread(encode)

    async def encode_judged(
        self, turns: Sequence[Message], *, begins_answer: bool, options: TemplateOptions
    ) -> list[int]:
        """Encode a query and a document in the turns that a reranker's template has for them. Raises as `encode_chat`.

        Their roles may be other than those of a conversation. The caller checks their sizes.
        """
        size = sum(turn.num_chars for turn in turns)
        encode = partial(
            self._tokenizer.encode_chat,
            turns,
            add_generation_prompt=begins_answer,
            max_chars=4 * self.max_chars,
            options=options,
        )
        return encode() if size <= _INLINE_CHARS else await self._in_thread(encode)

    async def without_last_tokens(self, text: str, count: int) -> str:
        """Cut a text by its last `count` tokens, and by at least one character."""

        def cut() -> str:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            return self._tokenizer.decode(ids[: max(0, len(ids) - count)], skip_special_tokens=False)[: len(text) - 1]

        return cut() if len(text) <= _INLINE_CHARS else await self._in_thread(cut)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await self._threads.run(work, self._tenant)

    def check_size(self, chars: int, param: str) -> None:
        """Check a text's size before it is tokenized. Raises ContextLengthExceeded."""
        if chars > self.max_chars:
            context = f"the model's context of {self._model.max_model_len} tokens"
            raise ContextLengthExceeded(f"{param}: {chars} characters cannot fit {context}", param=param)

    def too_long_error(self, tokens: int, param: str, least: int = 1) -> ContextLengthExceeded:
        """Make the error for a prompt of so many tokens that fewer than `least` are left for the answer."""
        context = f"the model's context is {self._model.max_model_len} tokens"
        return ContextLengthExceeded(
            f"{param}: {tokens} tokens; {context}, of which at least {least} must be left for the answer", param=param
        )
