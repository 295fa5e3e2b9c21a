"""Relevance of documents for queries, by what the model was made for.

A generative reranker gives the probability of one of two next tokens, a classifier its head's score, an embedding
model the cosine of two vectors. A model whose files say none of this is refused: any number could be made up of it.
"""

import dataclasses
import math

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from router.api.embeddings import (
    MAX_INPUTS,
    Embedder,
    EmbeddingOptions,
    NewMeter,
    as_input_error,
    in_groups,
    score_group,
)
from router.api.frontend import Frontend
from router.api.pooled_inputs import MAX_PROMPT_CHARS, JudgedPair, LengthBound, PooledInput, PooledText, length_bound
from router.api.request.client_request import ClientRequest, PreparedRequest
from router.text.conversation import Message, TemplateOptions
from router.text.tokenizer import Tokenizer, check_text
from router.types.prompt_logprobs import PromptScoringRequest, ScoredPrompt
from router.types.requests import Generator
from tandem.errors import ConfigError, InternalError, InvalidRequest
from tandem.pooling_model import JudgeStyle, PoolingModel, PoolingTask
from tandem.values.pooling import PoolingMode

_QUERY, _DOCUMENT = "tandemsamplequery", "tandemsampledocument"
_MAX_TOKENS_PER_CHAR = 4  # the bytes of a character
_AS_QUERY = EmbeddingOptions(fallbacks=("query",), normalize=False)
_AS_DOCUMENT = EmbeddingOptions(fallbacks=("document", "passage", "corpus"), normalize=False)
_AS_IT_IS = EmbeddingOptions(normalize=False)


class RelevanceQuestion(Struct, frozen=True, kw_only=True):
    """Pairs of texts: each query with the document at its place, or one query with all."""

    queries: tuple[str, ...]
    documents: tuple[str, ...]
    query_param: str
    document_param: str
    """The fields that they came in."""
    has_roles: bool = True
    """Whether the first texts are queries and the others documents, for models with a prompt for each."""
    instruction: str | None = None

    def check(self) -> None:
        """Check numbers and sizes. Raises InvalidRequest."""
        for name, texts in ((self.query_param, self.queries), (self.document_param, self.documents)):
            if not 1 <= len(texts) <= MAX_INPUTS:
                raise InvalidRequest(f"{name} must have 1 to {MAX_INPUTS} texts", param=name)
            for text in texts:
                if not text:
                    raise InvalidRequest(f"{name}: empty text", param=name)
                check_text(text, name)
        if len(self.queries) not in (1, len(self.documents)):
            given = f"1 text, or as many as {self.document_param} ({len(self.documents)})"
            raise InvalidRequest(
                f"{self.query_param} must have {given}, has {len(self.queries)}", param=self.query_param
            )
        if self.instruction is not None and len(self.instruction) > MAX_PROMPT_CHARS:
            raise InvalidRequest(f"instruction must have at most {MAX_PROMPT_CHARS} characters", param="instruction")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Every query with its document."""
        queries = self.queries * len(self.documents) if len(self.queries) == 1 else self.queries
        return list(zip(queries, self.documents, strict=True))


class RelevanceScorer:
    """Scores pairs of texts; one per router, which the HTTP and the gRPC server share."""

    def __init__(self, frontend: Frontend, generator: Generator, embedder: Embedder) -> None:
        self._frontend = frontend
        self._generator = generator
        self._embedder = embedder

    async def score(
        self, question: RelevanceQuestion, fields: ClientRequest, new_meter: NewMeter
    ) -> tuple[list[float], int]:
        """Return one score for each pair, in order, and the number of prompt tokens. Raises InvalidRequest,
        ContextLengthExceeded, ModelNotFound, or what `Generator.run` raises.
        """
        self._frontend.check_base_model(fields.model, fields.tenant)
        question.check()
        pooling = self._frontend.model.pooling
        if pooling is None:
            reason = "its files define neither embeddings nor a reranker"
            raise InvalidRequest(f"model: {reason}, so it has no scores (docs/use/models.md)", param="model")
        if pooling.task is not PoolingTask.JUDGE and question.instruction is not None:
            raise InvalidRequest("instruction is for generative rerankers only", param="instruction")
        fields = replace(fields, max_tokens=1, num_choices=1, reads_along=False)
        try:
            if pooling.task is PoolingTask.EMBED:
                return await self._cosines(question, fields, new_meter)
            return await self._score_pairs(pooling, question, fields, new_meter)
        except InvalidRequest as error:
            name = question.document_param
            raise as_input_error(as_input_error(error, name), name, "messages") from error

    async def _score_pairs(
        self, pooling: PoolingModel, question: RelevanceQuestion, fields: ClientRequest, new_meter: NewMeter
    ) -> tuple[list[float], int]:
        """Tokenize and score pairs a group at a time: each has the query, which makes much of a small body."""
        prompts, scoring = self._pairs(pooling, question, fields)
        await self._check_repeated(question, fields.tenant)
        ends_s = self._frontend.deadline_s(fields)
        fields = replace(fields, scoring=scoring, truncate_prompt_tokens=None)
        scores: list[float] = []
        num_tokens = 0
        for group in in_groups(prompts):
            fields = replace(fields, time_left_s=ends_s - self._frontend.clock())
            prepared = await self._frontend.prepare_prompts(group, fields, tokens_before=num_tokens)
            num_tokens += sum(len(one.request.prompt_token_ids) for one in prepared)
            scored = await score_group(self._frontend, self._generator, prepared, new_meter)
            scores += [_score(pooling, one) for one in scored]
        return scores, num_tokens

    async def _check_repeated(self, question: RelevanceQuestion, tenant: str) -> None:
        """Check, before any pair is tokenized, the tokens that all pairs repeat. Raises InvalidRequest."""
        name, text = "instruction", question.instruction or ""
        if len(question.queries) == 1:
            name, text = question.query_param, text + question.queries[0]
        count, most = len(question.documents), self._frontend.max_call_tokens
        if len(text) * _MAX_TOKENS_PER_CHAR * count <= most:
            return
        with self._frontend.preparing(tenant) as prompts:
            num_tokens = len(await prompts.encode(text, add_special_tokens=False))
        if num_tokens * count > most:
            sent = f"{num_tokens} tokens for each of {count} {question.document_param}"
            raise InvalidRequest(
                f"{name}: {sent} are more than {most} in one call (router.queue.max_tokens)", param=name
            )

    def _pairs(
        self, pooling: PoolingModel, question: RelevanceQuestion, fields: ClientRequest
    ) -> tuple[list[PooledInput], PromptScoringRequest]:
        """The prompts of a reranker's pairs, and what workers compute of them."""
        bound = length_bound(
            pooling, self._frontend.model.max_model_len, fields.truncate_prompt_tokens, question.document_param
        )
        for query in question.queries:
            self._frontend.prompts.check_size(len(query), question.query_param)
        for document in () if bound.cuts else question.documents:
            self._frontend.prompts.check_size(len(document), question.document_param)
        if pooling.task is PoolingTask.JUDGE:
            scoring = PromptScoringRequest(
                num_top=0, only=True, is_relevance=True, label_token_ids=pooling.label_token_ids
            )
            return [_judged(pooling, question.instruction, bound, *pair) for pair in question.pairs], scoring
        if pooling.num_labels != 1:
            reason = f"its classification head has {pooling.num_labels} labels; one is relevance"
            raise InvalidRequest(f"model: {reason}", param="model")
        scoring = PromptScoringRequest(
            num_top=None, only=True, is_relevance=True, pooling=(PoolingMode.LAST,), through_head=True
        )
        return [PooledText(text=query, pair=document, bound=bound) for query, document in question.pairs], scoring

    async def _cosines(
        self, question: RelevanceQuestion, fields: ClientRequest, new_meter: NewMeter
    ) -> tuple[list[float], int]:
        sides = (_AS_QUERY, _AS_DOCUMENT) if question.has_roles else (_AS_IT_IS, _AS_IT_IS)
        prepared: list[PreparedRequest] = []
        params = (question.query_param, question.document_param)
        # Documents are cut, queries are not: as where a model reads pairs.
        asked = (replace(fields, truncate_prompt_tokens=None), fields)
        for texts, side, options, param in zip(
            (question.queries, question.documents), asked, sides, params, strict=True
        ):
            try:
                prepared += await self._embedder.prepare(texts, side, options)
            except InvalidRequest as error:
                raise as_input_error(error, param, "input") from error
        vectors, usage = await self._embedder.embed(prepared, new_meter, _AS_IT_IS, are_shown=False)
        units = np.array(vectors, dtype=np.float64)
        lengths = np.linalg.norm(units, axis=1, keepdims=True)
        if not lengths.all():
            raise InternalError("the model produced unusable hidden states")
        units /= lengths
        count = len(question.queries)
        return list((units[:count] * units[count:]).sum(axis=1).tolist()), usage.prompt_tokens


def completed(pooling: PoolingModel, tokenizer: Tokenizer, vocab_size: int) -> PoolingModel:
    """Complete a generative reranker by what its tokenizer says, and check that the template has a place for pairs.

    Raises ConfigError.
    """
    if pooling.task is not PoolingTask.JUDGE:
        return pooling
    labels = (pooling.true_token_id, pooling.false_token_id)
    if None in labels:
        labels = (_only_token(tokenizer, "yes"), _only_token(tokenizer, "no"))
    if any(label is None or label >= vocab_size for label in labels):
        raise ConfigError(f"the reranker's tokens {labels} are not in the model's vocabulary of {vocab_size}")
    if not tokenizer.has_chat_template:
        raise ConfigError("a generative reranker needs a chat template")
    if pooling.style is JudgeStyle.ROLES:
        turns = [Message(role="query", content=_QUERY), Message(role="document", content=_DOCUMENT)]
        ids = tokenizer.encode_chat(
            turns, add_generation_prompt=pooling.begins_answer, max_chars=1 << 20, options=TemplateOptions()
        )
        shown = tokenizer.decode(ids, skip_special_tokens=False)
        if _QUERY not in shown or _DOCUMENT not in shown:
            raise ConfigError("the chat template does not render messages of the roles query and document")
    return dataclasses.replace(pooling, true_token_id=labels[0], false_token_id=labels[1])


def _only_token(tokenizer: Tokenizer, text: str) -> int | None:
    """The one token that a text is; None where it is several."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None


def _judged(
    pooling: PoolingModel, instruction: str | None, bound: LengthBound, query: str, document: str
) -> JudgedPair:
    if instruction is None and pooling.style is JudgeStyle.ROLES:
        instruction = pooling.prompt(None)
    return JudgedPair(
        query=query,
        document=document,
        instruction=instruction,
        style=pooling.style,
        begins_answer=pooling.begins_answer,
        bound=bound,
    )


def _score(pooling: PoolingModel, scored: ScoredPrompt) -> float:
    """Make the score of what a worker has computed of a pair."""
    is_judged = pooling.task is PoolingTask.JUDGE
    logit = scored.logprobs[0] - scored.logprobs[1] if is_judged else scored.mean[0]
    if not math.isfinite(logit):
        raise InternalError("the model produced unusable scores")
    return _sigmoid(logit) if pooling.activation == "sigmoid" else logit


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))
