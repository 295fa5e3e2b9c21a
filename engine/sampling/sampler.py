"""Chooses tokens from logits: a function of logits and Request alone, so that any worker continues any request alike.

Order, as in vLLM: log probabilities of the untouched logits; a grammar's mask; banned and biased tokens; penalties;
temperature; min-p; top-k; top-p; then a draw with noise fixed by (seed, choice, position) alone
(`engine.sampling.backend`). Greedy rows skip everything from the temperature on.

Nothing here waits for a device or needs a token that only the device knows: positions follow from lengths, and the
counts for penalties are kept beside the logits (`engine.sampling.token_counts`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.sampling.backend import DrawParams, LogitEdits, SamplingKernels, TorchSampling
from engine.sampling.token_counts import CountedRequests, Penalties, Put
from engine.types.request import Batch, Request
from engine.types.token_guide import TokenGuide, num_words
from tandem.values.sampling import SamplingParams


class GuidedRows:
    """Guides of a batch's rows and the array of their masks, kept while the requests stay the same: right after a
    model's step even small arrays are slow to make, since nothing that Python needs is in the processor's caches.
    """

    def __init__(self, guides: Sequence[tuple[int, TokenGuide]], vocab_size: int, put: Put) -> None:
        """`guides`: pairs of row and guide, ascending by row; at least one."""
        self._rows = put(np.array([row for row, _ in guides], dtype=np.int64))
        self._bits = np.zeros((len(guides), num_words(vocab_size)), dtype=np.int32)
        self._guides = [(row, guide, bits) for (row, guide), bits in zip(guides, self._bits, strict=True)]

    def forbid_(self, logits: Tensor, rows: "Sequence[SampleRow]", kernels: SamplingKernels, put: Put) -> None:
        """Mask, in place, these rows of float32 `[num_rows, vocab_size]` logits by what their guides allow, after the
        drafts of each row of `rows`. Nothing is allowed after a draft that a guide refuses.
        """
        self._bits.fill(0)
        ahead: TokenGuide | None = None
        for row, guide, bits in self._guides:
            drafts = rows[row].drafts
            if not drafts:
                guide.allow(bits)
            elif len(drafts) == 1:
                ahead = _after(guide.fork(), drafts[0])
            elif ahead is not None:
                ahead = _after(ahead, drafts[-1])  # the row before it has one draft less
            if drafts and ahead is not None:
                ahead.allow(bits)
        kernels.forbid_(logits, self._rows, put(self._bits))


def _after(ahead: TokenGuide, draft: int) -> TokenGuide | None:
    return ahead if ahead.accept(draft) and not ahead.is_over else None


def guided_rows(guides: Sequence[TokenGuide | None], vocab_size: int, put: Put) -> GuidedRows | None:
    """Make GuidedRows from each row's guide or None; None when no row has a guide."""
    found = [(row, guide) for row, guide in enumerate(guides) if guide is not None]
    return GuidedRows(found, vocab_size, put) if found else None


_BANNED = float("-inf")
_MAX_GROUP_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Logits sampled together, by device type: sampling takes several times their memory, at every batch size. On a GPU
nearly a whole batch, since launches cost more there.
"""


class SampleRow(NamedTuple):
    """A request that samples, and the new token's position, counted from the sequence's start."""

    request: Request
    num_tokens: int
    drafts: tuple[int, ...] = ()
    """The last of these tokens, if they are drafts. A request's rows follow each other, each with one draft more."""


def sample_rows(batch: Batch) -> list[SampleRow]:
    """The rows that a batch samples, in order: one for each item that samples, and one for each of its drafts."""
    rows = []
    for request, start, num_tokens, samples, drafts in batch.items:
        if samples:
            end = start + num_tokens
            rows.append(SampleRow(request, end))
            rows += [SampleRow(request, end + i, drafts[:i]) for i in range(1, len(drafts) + 1)]
    return rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLogprobs:
    """Log probabilities of the rows that requested them."""

    rows: tuple[int, ...]  # [num_asking]
    num_top: tuple[int, ...]  # [num_asking]
    sampled: Tensor  # float32 [num_asking]
    top_ids: Tensor  # int64 [num_asking, most]
    top_values: Tensor  # float32 [num_asking, most]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chosen:
    """A step's samples, on the device."""

    token_ids: Tensor  # int64 [num_rows]; UNUSABLE: none could be chosen
    logprobs: tuple[RowLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Group:
    """Properties of rows that stay the same as long as their requests do; computed once."""

    requests: list[Request]
    is_plain: bool
    """True when all rows are greedy, and none is edited or penalised."""
    is_edited: bool
    is_penalised: bool
    asking: tuple[int, ...]
    """Rows that want log probabilities."""
    guided: GuidedRows | None
    """Guides of the rows that a grammar guides; None without any."""
    floats: Tensor  # float32 [6, num_rows]: temperature, min-p, top-p, repetition, presence, frequency
    integers: Tensor  # int64 [3, num_rows]: top-k, seed, choice


class Sampler:
    """Chooses one token per row. State kept between steps only saves work."""

    def __init__(
        self,
        *,
        eos_token_ids: Sequence[int],
        device: torch.device | str = "cpu",
        kernels: SamplingKernels | None = None,
        put: Put | None = None,
    ) -> None:
        """`kernels`: the device's; None: plain torch. `put`: copies an array to the device; None: waits for the
        copy.
        """
        self._device = torch.device(device)
        self._kernels: SamplingKernels = kernels or TorchSampling()
        self._eos_token_ids = tuple(eos_token_ids)
        self._put: Put = put or (lambda array: torch.from_numpy(array).to(self._device))
        self._groups: dict[int, _Group] = {}
        self._counted: CountedRequests | None = None

    def choose(self, logits: Tensor, rows: Sequence[SampleRow]) -> Chosen:
        """Choose one token for each row of float32 `[num_rows, vocab_size]` logits; rows with guides are masked in
        place.
        """
        size = max(1, _MAX_GROUP_ELEMENTS[self._device.type] // logits.shape[1])
        parts: list[Chosen] = []
        begins: set[int] = set()
        begin = 0
        while begin < len(rows):
            end = min(begin + size, len(rows))
            while end < len(rows) and rows[end].drafts:
                end += 1  # rows of one request stay together
            parts.append(self._choose_group(logits, rows, begin, end))
            begins.add(begin)
            begin = end
        if len(self._groups) > len(parts):
            self._groups = {begin: group for begin, group in self._groups.items() if begin in begins}
        if len(parts) == 1:
            return parts[0]
        return Chosen(
            token_ids=torch.cat([part.token_ids for part in parts]),
            logprobs=tuple(found for part in parts for found in part.logprobs),
        )

    def _choose_group(self, all_logits: Tensor, all_rows: Sequence[SampleRow], begin: int, end: int) -> Chosen:
        logits, rows = all_logits[begin:end], all_rows[begin:end]
        group = self._group(begin, [row.request for row in rows], logits.shape[1])
        asking = self._put(np.array(group.asking, dtype=np.int64)) if group.asking else None
        untouched = None if asking is None else logits[asking]
        if group.guided is not None:
            group.guided.forbid_(logits, rows, self._kernels, self._put)
        if group.is_plain:
            tokens = self._kernels.choose(logits, None)
        else:
            tokens = self._kernels.choose(
                logits,
                self._draw_params(group, rows),
                penalties=self._penalties(group, rows, all_rows, logits.shape[1]) if group.is_penalised else None,
                edits=self._edits(rows) if group.is_edited else None,
            )
        if asking is None or untouched is None:
            return Chosen(token_ids=tokens)
        return Chosen(token_ids=tokens, logprobs=(_logprobs(group, untouched, tokens[asking], begin),))

    def _group(self, begin: int, requests: list[Request], vocab_size: int) -> _Group:
        """The group of the rows from `begin` on; the previous step's, if its requests were the same."""
        group = self._groups.get(begin)
        if group is None or group.requests != requests:
            group = self._groups[begin] = self._make_group(requests, vocab_size)
        return group

    def _make_group(self, requests: list[Request], vocab_size: int) -> _Group:
        params = [request.params for request in requests]
        is_edited = any(p.logit_bias or p.min_tokens for p in params)
        is_penalised = any(_has_penalties(p) for p in params)
        is_plain = not (is_edited or is_penalised) and all(p.greedy for p in params)
        floats = [
            (p.temperature, p.min_p, p.top_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for p in params
        ]
        integers = [(p.top_k, p.seed, request.choice_index) for p, request in zip(params, requests, strict=True)]
        return _Group(
            requests=requests,
            is_plain=is_plain,
            is_edited=is_edited,
            is_penalised=is_penalised,
            asking=tuple(i for i, p in enumerate(params) if p.num_logprobs is not None),
            guided=guided_rows([request.guide for request in requests], vocab_size, self._put),
            floats=self._put(np.array([] if is_plain else floats, dtype=np.float32).reshape(-1, 6).T.copy()),
            integers=self._put(np.array([] if is_plain else integers, dtype=np.int64).reshape(-1, 3).T.copy()),
        )

    def _draw_params(self, group: _Group, rows: Sequence[SampleRow]) -> DrawParams:
        positions = [row.num_tokens - row.request.num_prompt_tokens for row in rows]
        return DrawParams(
            temperature=group.floats[0],
            min_p=group.floats[1],
            top_p=group.floats[2],
            top_k=group.integers[0],
            seed=group.integers[1],
            position=self._put(np.array(positions, dtype=np.int64)),
            choice=group.integers[2],
        )

    def _penalties(
        self, group: _Group, rows: Sequence[SampleRow], all_rows: Sequence[SampleRow], vocab_size: int
    ) -> Penalties:
        if self._counted is None:
            self._counted = CountedRequests(vocab_size, self._device, self._put)
        penalised = [row if _has_penalties(row.request.params) else None for row in rows]
        slots = self._counted.slots(penalised, keep=frozenset(row.request for row in all_rows))
        return Penalties(
            counts=self._counted.counts,
            slots=self._put(slots),
            repetition=group.floats[3],
            presence=group.floats[4],
            frequency=group.floats[5],
            drafts=self._drafts(rows),
        )

    def _drafts(self, rows: Sequence[SampleRow]) -> Tensor | None:
        """Drafts before each row, int64 `[num_rows, most]`, padded with -1; None when there are none."""
        most = max([len(row.drafts) for row in rows])
        if not most:
            return None
        padded = [row.drafts + (-1,) * (most - len(row.drafts)) for row in rows]
        return self._put(np.array(padded, dtype=np.int64))

    def _edits(self, rows: Sequence[SampleRow]) -> LogitEdits | None:
        """Biases and bans of these rows; None when there are none at present."""
        edits = [
            (row, token, bias)
            for row, sample in enumerate(rows)
            if sample.request.params.logit_bias
            for token, bias in sample.request.params.logit_bias.items()
        ]
        edits += [(row, token, _BANNED) for row, sample in enumerate(rows) for token in self._banned(sample)]
        if not edits:
            return None
        numbers = np.array([edit[:2] for edit in edits], dtype=np.int32)
        return LogitEdits(
            rows=self._put(numbers[:, 0].copy()),
            token_ids=self._put(numbers[:, 1].copy()),
            values=self._put(np.array([edit[2] for edit in edits], dtype=np.float32)),
        )

    def _banned(self, row: SampleRow) -> tuple[int, ...]:
        """Tokens banned now, because they would end the choice before its `min_tokens`."""
        params = row.request.params
        if row.num_tokens - row.request.num_prompt_tokens >= params.min_tokens:
            return ()
        return params.stop_token_ids if params.ignore_eos else params.stop_token_ids + self._eos_token_ids


def _logprobs(group: _Group, logits: Tensor, tokens: Tensor, begin: int) -> RowLogprobs:
    """Log probabilities from the asking rows' untouched logits `[num_asking, vocab_size]` and tokens `[num_asking]`."""
    logprobs = logits.log_softmax(dim=-1)
    num_top = tuple(group.requests[row].params.num_logprobs or 0 for row in group.asking)
    top = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)
    return RowLogprobs(
        rows=tuple(begin + row for row in group.asking),
        num_top=num_top,
        sampled=logprobs.gather(-1, tokens.clamp(min=0)[:, None])[:, 0],
        top_ids=top.indices,
        top_values=top.values,
    )


def _has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
