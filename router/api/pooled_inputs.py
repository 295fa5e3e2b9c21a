"""Inputs of pooling models as prompts: texts behind a prompt, pairs of texts, pairs in a judge's conversation."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from router.api.prompts import PromptReader
from router.text.conversation import Message, TemplateOptions
from tandem.errors import ContextLengthExceeded, InvalidRequest
from tandem.pooling_model import JudgeStyle, PoolingModel

MAX_PROMPT_CHARS = 8192
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
_MOST_CUTS = 8


class PooledInput(Protocol):
    """A prompt that is tokenized in a way of its own."""

    async def token_ids(self, prompts: PromptReader) -> Sequence[int]:
        """Tokenize it. Raises InvalidRequest or ContextLengthExceeded."""
        ...


class LengthBound(Struct, frozen=True, kw_only=True):
    """How many tokens an input may have, and what becomes of a longer one."""

    most: int
    cuts: bool
    """Whether a longer input is cut at its end; otherwise it is refused."""
    param: str
    """The field that the input came in."""

    def error(self, num_tokens: int) -> ContextLengthExceeded:
        """Make the error for a longer input."""
        return ContextLengthExceeded(
            f"{self.param}: {num_tokens} tokens; this model takes at most {self.most}: send less "
            "(truncate_prompt_tokens cuts inputs and documents)",
            param=self.param,
        )


def length_bound(
    pooling: PoolingModel, max_model_len: int, truncate_prompt_tokens: int | None, param: str
) -> LengthBound:
    """Bound an input by the model's files, its context, and what the client asks for. Raises InvalidRequest."""
    most = min(max_model_len, pooling.max_tokens or max_model_len)
    if truncate_prompt_tokens is None:
        return LengthBound(most=most, cuts=False, param=param)
    if truncate_prompt_tokens != -1 and not 1 <= truncate_prompt_tokens <= most:
        name = "truncate_prompt_tokens"
        raise InvalidRequest(f"{name} must be -1 or an integer in [1, {most}]", param=name)
    kept = most if truncate_prompt_tokens == -1 else truncate_prompt_tokens
    return LengthBound(most=kept, cuts=True, param=param)


class PooledText(Struct, frozen=True, kw_only=True):
    """A text with its prompt in front, or a pair of texts; the tokenizer puts its own tokens around."""

    text: str
    pair: str | None = None
    add_special_tokens: bool = True
    bound: LengthBound
    num_skipped: int = 0
    """Tokens of the prompt in front, where they are not pooled."""

    async def token_ids(self, prompts: PromptReader) -> Sequence[int]:
        kept = self.bound.most if self.bound.cuts else None
        ids = await prompts.encode_pair(
            self.text, self.pair, add_special_tokens=self.add_special_tokens, kept=kept, param=self.bound.param
        )
        if len(ids) > self.bound.most:
            raise self.bound.error(len(ids))
        if len(ids) <= self.num_skipped:
            raise InvalidRequest(f"{self.bound.param}: no token of it stands behind the prompt", param=self.bound.param)
        return ids


class PooledIds(Struct, frozen=True, kw_only=True):
    """Token ids as a client sent them."""

    ids: tuple[int, ...]
    bound: LengthBound

    async def token_ids(self, prompts: PromptReader) -> Sequence[int]:
        if len(self.ids) > self.bound.most and not self.bound.cuts:
            raise self.bound.error(len(self.ids))
        return self.ids[: self.bound.most]


class JudgedPair(Struct, frozen=True, kw_only=True):
    """A query and a document in the conversation in which a generative reranker judges them."""

    query: str
    document: str
    instruction: str | None
    style: JudgeStyle
    begins_answer: bool
    bound: LengthBound

    async def token_ids(self, prompts: PromptReader) -> Sequence[int]:
        bound = self.bound
        # What is cut need not be read.
        document = self.document[: prompts.max_chars] if bound.cuts else self.document
        for _ in range(_MOST_CUTS):
            ids = await self._encode(prompts, document)
            if len(ids) <= bound.most:
                return ids
            if not bound.cuts:
                raise bound.error(len(ids))
            if not document:
                break
            document = await prompts.without_last_tokens(document, len(ids) - bound.most)
        raise InvalidRequest(f"{bound.param}: {bound.most} tokens leave no room for it", param=bound.param)

    async def _encode(self, prompts: PromptReader, document: str) -> list[int]:
        if self.style is JudgeStyle.QWEN3:
            instruction = QWEN3_INSTRUCTION if self.instruction is None else self.instruction
            asked = f"<Instruct>: {instruction}\n<Query>: {self.query}\n<Document>: {document}"
            turns = [Message(role="system", content=_QWEN3_SYSTEM), Message(role="user", content=asked)]
            options = TemplateOptions(thinks=False)
        else:
            turns = [Message(role="query", content=self.query), Message(role="document", content=document)]
            if self.instruction:
                turns.insert(0, Message(role="system", content=self.instruction))
            options = TemplateOptions()
        return await prompts.encode_judged(turns, begins_answer=self.begins_answer, options=options)
