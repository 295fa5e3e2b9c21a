"""Samples tokens on the device, without a host round trip: the steps and the order of `engine.sampling.sampler`.

Biases and bans are added first, as a list of edits. A first kernel, parallel over sections of the vocabulary, applies
penalties and temperature and adds the noise; a second, one program a row, finds the cut-offs and the winner
(`engine.kernels.triton.cutoffs`) and counts the token it chose. A row of temperature 0 is greedy: no noise, no
cut-offs. The share of top-p is taken of everything that min-p and top-k keep, ties included. A row that holds NaN or
infinity, or nothing finite, is detected while it is read, and gets no token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.triton.cutoffs import best_above, kth_largest, largest_of
from engine.kernels.triton.noise import accurate_log, gumbel_tile
from engine.sampling.backend import UNUSABLE, DrawParams, LogitEdits, forbid_by_torch_
from engine.sampling.token_counts import Penalties, TokenCounts
from tandem.errors import ConfigError

_PREPARE_BLOCK = 1024
_SELECT_BLOCK = 4096
_SELECT_WARPS = 16
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


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperature_ptr", "seed_ptr", "position_ptr", "choice_ptr", "slots_ptr", "repetition_ptr", "presence_ptr",
        "frequency_ptr",
    ]
)  # fmt: skip
def prepare_kernel(
    logits_ptr, scaled_ptr, noisy_ptr, temperature_ptr, seed_ptr, position_ptr, choice_ptr,
    counts_ptr, slots_ptr, repetition_ptr, presence_ptr, frequency_ptr, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one section of one row: the scaled logits, and those plus noise."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    tokens = first + tl.arange(0, BLOCK)
    inside = tokens < vocab_size
    where = row * vocab_size + tokens
    x = tl.load(logits_ptr + where, mask=inside, other=0.0)
    if counts_ptr is not None:
        x = _penalised(x, tokens, inside, row, vocab_size, counts_ptr, slots_ptr, repetition_ptr, presence_ptr,
                       frequency_ptr)  # fmt: skip
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        x = tl.div_rn(x, tl.zeros([BLOCK], tl.float32) + temperature)
        position, choice = tl.load(position_ptr + row), tl.load(choice_ptr + row)
        noise = gumbel_tile(first, position, choice, tl.load(seed_ptr + row), BLOCK)
        tl.store(noisy_ptr + where, x + noise, mask=inside)
    else:
        tl.store(noisy_ptr + where, x, mask=inside)
    tl.store(scaled_ptr + where, x, mask=inside)


@triton.jit(
    do_not_specialize_on_alignment=[
        "out_ptr", "temperature_ptr", "min_p_ptr", "top_p_ptr", "top_k_ptr", "slots_ptr",
    ]
)  # fmt: skip
def select_kernel(
    scaled_ptr, noisy_ptr, out_ptr, temperature_ptr, min_p_ptr, top_p_ptr, top_k_ptr, counts_ptr, slots_ptr,
    vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose one row's token: cut-offs and winner. For a plain argmax, scaled and noisy logits may be the same
    tensor.
    """
    row = tl.program_id(0).to(tl.int64)
    scaled_ptr += row * vocab_size
    noisy_ptr += row * vocab_size
    floor = tl.full([], float("-inf"), tl.float32)
    peak = tl.full([], 0.0, tl.float32)
    top_p = tl.full([], 1.0, tl.float32)
    # Nested: the outer condition is evaluated when compiling.
    if temperature_ptr is not None:  # noqa: SIM102
        if tl.load(temperature_ptr + row) > 0.0:
            min_p, top_k = tl.load(min_p_ptr + row), tl.load(top_k_ptr + row)
            top_p = tl.load(top_p_ptr + row)
            if (min_p > 0.0) | (top_p < 1.0):
                peak = largest_of(scaled_ptr, vocab_size, BLOCK)
                if min_p > 0.0:
                    floor = peak + accurate_log(min_p)
            if (top_k > 0) & (top_k < vocab_size):
                floor = tl.maximum(floor, kth_largest(scaled_ptr, vocab_size, top_k.to(tl.int32), BLOCK))
    mass, token, usable = best_above(scaled_ptr, noisy_ptr, vocab_size, floor, peak, False, BLOCK)
    if top_p < 1.0:
        allowed = top_p * mass
        checking = usable & (peak > float("-inf"))
        while checking:
            value = tl.load(scaled_ptr + token)
            above, higher, _ = best_above(scaled_ptr, noisy_ptr, vocab_size, value, peak, True, BLOCK)
            # The largest is kept even when `allowed` is rounded to zero.
            checking = (above >= allowed) & (value < peak)
            token = tl.where(checking, higher, token)
    tl.store(out_ptr + row, tl.where(usable, token, _UNUSABLE).to(tl.int64))
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
        if params is None:
            select_kernel[(num_rows,)](
                logits, logits, out, None, None, None, None, None, None, vocab_size,
                BLOCK=_SELECT_BLOCK, num_warps=_SELECT_WARPS,
            )  # fmt: skip
            return out
        if edits is not None and len(edits.rows):
            logits = _edited(logits, edits)
        scaled, noisy = torch.empty_like(logits), torch.empty_like(logits)
        p = penalties
        marks = (None, None) if p is None else (p.counts.counts, p.slots)
        factors = (None, None, None) if p is None else (p.repetition, p.presence, p.frequency)
        prepare_kernel[(num_rows, -(-vocab_size // _PREPARE_BLOCK))](
            logits, scaled, noisy, params.temperature, params.seed, params.position, params.choice,
            *marks, *factors, vocab_size, BLOCK=_PREPARE_BLOCK,
        )  # fmt: skip
        select_kernel[(num_rows,)](
            scaled, noisy, out, params.temperature, params.min_p, params.top_p, params.top_k, *marks, vocab_size,
            BLOCK=_SELECT_BLOCK, num_warps=_SELECT_WARPS,
        )  # fmt: skip
        return out

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
