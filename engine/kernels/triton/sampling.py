"""Samples tokens on the device, without a host round trip: the steps and the order of `engine.sampling.sampler`.

Biases and bans are added first, as a list of edits. A first kernel, parallel over sections of the vocabulary, reads
every logit once: it applies penalties and temperature, and notes the largest of each group of tokens. It draws, too,
in rows where every token may win. A second, one program a row, finds the cut-offs from those notes, reads again the few
groups that matter (`engine.kernels.triton.cutoffs`), draws from them, and counts the token it chose. A row of
temperature 0 is greedy: no noise, no cut-offs. The share of top-p is taken of everything that min-p and top-k keep,
ties included. A row that holds NaN or infinity, or nothing finite, is detected while it is read, and gets no token.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.cutoffs import (
    LEAST,
    NOWHERE,
    draw,
    draw_listed,
    first_of,
    kth_bound,
    kth_listed,
    list_groups,
    mass_listed,
    order_of,
    scaled,
)
from engine.kernels.triton.noise import accurate_log
from engine.kernels.triton.pages import power_of_two
from engine.sampling.backend import UNUSABLE, DrawParams, LogitEdits, forbid_by_torch_
from engine.sampling.token_counts import Penalties, TokenCounts
from tandem.errors import ConfigError

_BLOCK = 2048
"""Tokens read at a time; in the first kernel, a section."""
_SMALLEST_GROUP = 32
"""Tokens whose logits fill a cache line, so that reading fewer of them together would save nothing."""
_MOST_GROUPS = 8192
"""Groups of one row: their largest logits are held in registers."""
_SURVEY_WARPS, _SELECT_WARPS = 4, 8
_UNUSABLE = tl.constexpr(UNUSABLE)

# The sampling parameters of all rows lie in one array, one kind after the other, so a kind's alignment depends on the
# number of rows. Numbers are read one at a time: kernels compiled for each alignment would gain nothing and delay the
# first requests.


@triton.jit(do_not_specialize=["count"])
def edit_kernel(logits_ptr, rows_ptr, token_ids_ptr, values_ptr, count, vocab_size, BLOCK: tl.constexpr):
    """Add edits to logits. Atomic, since one token may be both biased and banned."""
    edit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + edit, mask=edit < count, other=-1).to(tl.int64)
    token = tl.load(token_ids_ptr + edit, mask=edit < count, other=0)
    value = tl.load(values_ptr + edit, mask=edit < count, other=0.0)
    tl.atomic_add(logits_ptr + row * vocab_size + token, value, mask=row >= 0)


@triton.jit
def _penalised(x, tokens, inside, row, vocab_size, counts_ptr, slots_ptr, repetition_ptr, presence_ptr, frequency_ptr):
    slot = tl.load(slots_ptr + row).to(tl.int64)
    seen = tl.load(counts_ptr + slot * vocab_size + tokens, mask=tl.where(inside, slot, -1) >= 0, other=0)
    repetition = tl.load(repetition_ptr + row)
    repeated = tl.where(x > 0.0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
    x = tl.where(seen > 0, repeated, x)
    output = (seen >> 1).to(tl.float32)
    x -= tl.load(frequency_ptr + row) * output
    return tl.where(output > 0.0, x - tl.load(presence_ptr + row), x)


@triton.jit
def _is_limited(min_p, top_k, vocab_size):
    """Whether min-p or top-k leaves only a row's largest logits: then the draw can wait until those are known."""
    return (min_p > 0.0) | ((top_k > 0) & (top_k < vocab_size))


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperature_ptr", "min_p_ptr", "top_p_ptr", "top_k_ptr", "seed_ptr", "position_ptr", "choice_ptr", "slots_ptr",
        "repetition_ptr", "presence_ptr", "frequency_ptr",
    ]
)  # fmt: skip
def survey_kernel(
    logits_ptr, adjusted_ptr, maxima_ptr, sections_ptr, temperature_ptr, min_p_ptr, top_p_ptr, top_k_ptr, seed_ptr,
    position_ptr, choice_ptr, counts_ptr, slots_ptr, repetition_ptr, presence_ptr, frequency_ptr, vocab_size,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Read one section of one row and note the largest scaled logit of each group; in rows without min-p and top-k,
    also four numbers of the section: the winner of its draw, with noise; its token; the peak and sum of exp(x - peak).
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    tokens = first + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    x = tl.load(logits_ptr + row * vocab_size + tokens, mask=inside, other=float("-inf"))
    if counts_ptr is not None:
        x = _penalised(x, tokens, inside, row, vocab_size, counts_ptr, slots_ptr, repetition_ptr, presence_ptr,
                       frequency_ptr)  # fmt: skip
        tl.store(adjusted_ptr + row * vocab_size + tokens, x, mask=inside)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            x = scaled(x, temperature)
    marked = tl.where(x == x, x, float("inf"))  # noqa: PLR0124 - NaN alone
    place = row * tl.num_programs(1) + tl.program_id(1)
    groups = tl.arange(0, BLOCK // GROUP)
    tl.store(maxima_ptr + place * (BLOCK // GROUP) + groups, tl.max(tl.reshape(marked, [BLOCK // GROUP, GROUP]), 1))
    if temperature_ptr is not None:  # noqa: SIM102 - the outer condition is evaluated when compiling
        if (temperature > 0.0) & ~_is_limited(tl.load(min_p_ptr + row), tl.load(top_k_ptr + row), vocab_size):
            position, choice = tl.load(position_ptr + row), tl.load(choice_ptr + row)
            quads = first // 4 + tl.arange(0, BLOCK // 4)
            peak = tl.maximum(tl.max(marked, 0), -3e38)  # finite, in sections without candidates too
            none, nowhere = tl.full([], float("-inf"), tl.float32), tl.full([], NOWHERE, tl.int32)
            best, token = draw(x, tokens, quads, position, choice, tl.load(seed_ptr + row), peak, none, nowhere)
            sections_ptr += place * 4
            tl.store(sections_ptr, best)
            tl.store(sections_ptr + 1, token.to(tl.float32, bitcast=True))
            if tl.load(top_p_ptr + row) < 1.0:
                tl.store(sections_ptr + 2, peak)
                tl.store(sections_ptr + 3, tl.sum(tl.exp(x - peak), 0))


@triton.jit
def _sampled_token(
    x_ptr, size, temperature, position, choice, seed, min_p, top_p, top_k, orders, peak, listed_ptr, sections_ptr,
    num_sections, GROUP: tl.constexpr, PER_SECTION: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of one row above temperature zero; `orders`: of the largest logit of each group."""
    # What is noted of the sections; nothing in rows with min-p or top-k: a section's winner may be anything.
    limited = _is_limited(min_p, top_k, size)
    section = tl.arange(0, BLOCK_GROUPS // PER_SECTION)
    notes_ptr, noted = sections_ptr + section * 4, section < tl.where(limited, 0, num_sections)
    bests = tl.load(notes_ptr, mask=noted, other=float("inf"))
    winners = tl.load(notes_ptr + 1, mask=noted, other=0.0).to(tl.int32, bitcast=True)
    x = tl.load(x_ptr + winners, mask=noted & (winners < size), other=float("-inf"))
    reached = order_of(scaled(x, temperature))

    least, mass = tl.full([], LEAST, tl.int32), tl.full([], 0.0, tl.float32)
    checking = top_p < 1.0  # else the mass is not needed
    if limited:
        if min_p > 0.0:
            least = tl.maximum(least, order_of(peak + accurate_log(min_p)))
        k, most = tl.minimum(top_k, size).to(tl.int32), order_of(peak) + 1
        cuts_k = (k > 0) & (k < size)
        if cuts_k:
            least = tl.maximum(least, kth_bound(orders, num_sections * PER_SECTION, most, k, BLOCK_GROUPS))
        listed = list_groups(orders, least, listed_ptr, BLOCK_GROUPS)
        if cuts_k:
            least = kth_listed(x_ptr, size, temperature, listed_ptr, listed, least, most, k, GROUP, BLOCK)
        if checking:
            mass = mass_listed(x_ptr, size, temperature, listed_ptr, listed, least, peak, GROUP, 2 * BLOCK)
    elif checking:
        peaks = tl.load(notes_ptr + 2, mask=noted, other=float("-inf"))
        mass = tl.sum(tl.load(notes_ptr + 3, mask=noted, other=0.0) * tl.exp(peaks - peak), 0)

    token, searching = tl.full([], 0, tl.int32), tl.full([], True, tl.int1)
    while searching:
        # The best of the noted winners that are kept; and what is kept of sections whose winner is not, if it may win.
        kept = reached >= least
        best = tl.max(tl.where(kept, bests, float("-inf")), 0)
        token = first_of(kept & (bests == best), winners)
        open_sections = tl.broadcast_to(((bests >= best) & ~kept)[:, None], [BLOCK_GROUPS // PER_SECTION, PER_SECTION])
        candidates = tl.where(tl.reshape(open_sections, [BLOCK_GROUPS]), orders, LEAST - 1)
        listed = list_groups(candidates, least, listed_ptr, BLOCK_GROUPS)
        token = draw_listed(x_ptr, size, temperature, position, choice, seed, listed_ptr, listed, least, peak, best,
                            token, GROUP, BLOCK)  # fmt: skip
        searching = checking
        if checking:
            # Do the tokens above this one leave it out? The largest is kept even when its share rounds to zero.
            value = scaled(tl.load(x_ptr + token), temperature)
            least = order_of(value) + 1
            listed = list_groups(orders, least, listed_ptr, BLOCK_GROUPS)
            above = mass_listed(x_ptr, size, temperature, listed_ptr, listed, least, peak, GROUP, 2 * BLOCK)
            searching = (above >= top_p * mass) & (value < peak)
    return token


@triton.jit(
    do_not_specialize_on_alignment=[
        "out_ptr", "temperature_ptr", "min_p_ptr", "top_p_ptr", "top_k_ptr", "seed_ptr", "position_ptr", "choice_ptr",
        "slots_ptr",
    ]
)  # fmt: skip
def select_kernel(
    logits_ptr, maxima_ptr, out_ptr, sections_ptr, listed_ptr, temperature_ptr, min_p_ptr, top_p_ptr, top_k_ptr,
    seed_ptr, position_ptr, choice_ptr, counts_ptr, slots_ptr, vocab_size,
    GROUP: tl.constexpr, PER_SECTION: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose one row's token from what was noted of its sections, `PER_SECTION` groups each."""
    row = tl.program_id(0).to(tl.int64)
    num_sections = tl.cdiv(vocab_size, PER_SECTION * GROUP)
    num_groups = num_sections * PER_SECTION
    logits_ptr += row * vocab_size
    groups = tl.arange(0, BLOCK_GROUPS)
    maxima = tl.load(maxima_ptr + row * num_groups + groups, mask=groups < num_groups, other=float("-inf"))
    peak = tl.max(maxima, 0)
    usable = (peak > float("-inf")) & (peak < float("inf"))
    temperature = tl.full([], 0.0, tl.float32)
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
    token = tl.full([], _UNUSABLE, tl.int32)
    if usable & (temperature == 0.0):
        tokens = first_of(maxima == peak, groups) * GROUP + tl.arange(0, GROUP)
        x = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=float("-inf"))
        token = first_of(x == peak, tokens)
    # Nested: the outer condition is evaluated when compiling.
    if temperature_ptr is not None:  # noqa: SIM102
        if usable & (temperature > 0.0):
            token = _sampled_token(
                logits_ptr, vocab_size, temperature, tl.load(position_ptr + row), tl.load(choice_ptr + row),
                tl.load(seed_ptr + row), tl.load(min_p_ptr + row), tl.load(top_p_ptr + row), tl.load(top_k_ptr + row),
                order_of(maxima), peak, listed_ptr + row * num_groups, sections_ptr + row * num_sections * 4,
                num_sections, GROUP, PER_SECTION, BLOCK_GROUPS, BLOCK,
            )  # fmt: skip
    tl.store(out_ptr + row, token.to(tl.int64))
    if counts_ptr is not None:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        if usable & (slot >= 0):
            tl.atomic_add(counts_ptr + slot * vocab_size + token, 2)


class TritonSampling:
    """Implements engine.sampling.backend.SamplingKernels. Waits for nothing."""

    def choose(
        self,
        logits: Tensor,
        params: DrawParams | None,
        *,
        penalties: Penalties | None = None,
        edits: LogitEdits | None = None,
    ) -> Tensor:
        """See SamplingKernels. Raises ConfigError for logits of another dtype or layout than contiguous float32."""
        if logits.dtype != torch.float32 or not logits.is_contiguous():
            raise ConfigError("logits to sample from must be contiguous float32")
        num_rows, vocab_size = logits.shape
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        if not num_rows:
            return out
        if edits is not None and len(edits.rows):
            logits = _edited(logits, edits)
        group = power_of_two(-(-vocab_size // _MOST_GROUPS), _SMALLEST_GROUP)
        num_sections, per_section = -(-vocab_size // _BLOCK), _BLOCK // group
        num_groups = num_sections * per_section
        maxima = logits.new_empty(num_rows, num_groups)
        sections = listed = adjusted = None
        draw: tuple[Tensor | None, ...] = (None,) * 7
        marks: tuple[Tensor | None, ...] = (None,) * 2
        factors: tuple[Tensor | None, ...] = (None,) * 3
        if params is not None:
            sections = logits.new_empty(num_rows, num_sections, 4)
            listed = torch.empty_like(maxima, dtype=torch.int32)
            draw = (params.temperature, params.min_p, params.top_p, params.top_k,
                    params.seed, params.position, params.choice)  # fmt: skip
        if penalties is not None and penalties.drafts is not None:
            return self._choose_after_drafts(logits, params, penalties)
        if penalties is not None:
            adjusted = torch.empty_like(logits)
            marks = (penalties.counts.counts, penalties.slots)
            factors = (penalties.repetition, penalties.presence, penalties.frequency)
        survey_kernel[(num_rows, num_sections)](
            logits, adjusted, maxima, sections, *draw, *marks, *factors, vocab_size,
            GROUP=group, BLOCK=_BLOCK, num_warps=_SURVEY_WARPS,
        )  # fmt: skip
        select_kernel[(num_rows,)](
            logits if adjusted is None else adjusted, maxima, out, sections, listed, *draw, *marks, vocab_size,
            GROUP=group, PER_SECTION=per_section, BLOCK_GROUPS=power_of_two(num_groups), BLOCK=_BLOCK,
            num_warps=_SELECT_WARPS,
        )  # fmt: skip
        return out

    def _choose_after_drafts(self, logits: Tensor, params: DrawParams | None, penalties: Penalties) -> Tensor:
        """Choose with counts that no two rows share: copies, in which drafts are counted as well. Edits are made."""
        rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
        slots = torch.where(penalties.slots >= 0, rows, -1).to(torch.int32)
        counts = TokenCounts(counts=replace(penalties, slots=penalties.slots.clamp(min=0)).seen(rows.long()))
        tokens = self.choose(logits, params, penalties=replace(penalties, counts=counts, slots=slots, drafts=None))
        counted = (penalties.is_counted() & (tokens != UNUSABLE)).to(torch.int32)
        penalties.counts.counts.index_put_(
            (penalties.slots.clamp(min=0).long(), tokens.clamp(min=0)), 2 * counted, accumulate=True
        )
        return tokens

    def forbid_(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """See SamplingKernels. Torch operators suffice: making the masks on the host takes many times as long."""
        forbid_by_torch_(logits, rows, bits)


def compile_for(vocab_size: int, device: torch.device) -> None:
    """Compile every kernel that sampling from this vocabulary may launch, so that no request waits for the compiler.

    With one row: compiled kernels do not depend on the number of rows.
    """
    logits = torch.zeros(1, vocab_size, device=device)
    zero, one = torch.zeros(1, device=device), torch.ones(1, device=device)
    number = torch.zeros(1, dtype=torch.int64, device=device)
    params = DrawParams(
        temperature=one, min_p=zero, top_p=one, top_k=number, seed=number, position=number, choice=number
    )
    slots = torch.zeros(1, dtype=torch.int32, device=device)
    counts = TokenCounts.allocate(1, vocab_size, device)
    penalties = Penalties(counts=counts, slots=slots, repetition=one, presence=zero, frequency=zero)
    edits = LogitEdits(rows=slots, token_ids=slots, values=zero)
    sampling = TritonSampling()
    sampling.choose(logits, None)
    sampling.choose(logits, params)
    sampling.choose(logits, params, penalties=penalties, edits=edits)


def _edited(logits: Tensor, edits: LogitEdits) -> Tensor:
    edited, count = logits.clone(), len(edits.rows)
    edit_kernel[(-(-count // 128),)](
        edited, edits.rows, edits.token_ids, edits.values, count, logits.shape[1], BLOCK=128
    )
    return edited
