"""Decides whether a block is worth keeping below the pool and fetching: copying against computing, at measured rates.

A block costs its tokens over the rate of computing, or its bytes over each rate of copying on its way. Copying
to and from host memory is measured once at start, computing and reading while the worker runs. Until computing has
been measured, copying wins: its saving is still unknown, and trying costs little.
"""

from dataclasses import dataclass, replace

MAX_WAIT_S = 2.0
"""Longest wait of a request for a disk, however long computing would take."""
MIN_WAIT_S = 0.02
_WEIGHT = 0.2
_PROBE_EVERY = 64
"""Refusals after which a disk that was too slow is tried again: it may have been busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRates:
    """Rates at which this worker saves blocks and brings them back; 0 where nothing has been measured."""

    offload_bytes_per_s: float = 0.0
    load_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates(CopyRates):
    """Rates at which this worker computes and copies; 0 where nothing has been measured."""

    prefill_tokens_per_s: float = 0.0


def recompute_s(num_tokens: int, rates: MeasuredRates) -> float:
    """Time to compute `num_tokens` tokens again; infinite while the rate is unknown."""
    return num_tokens / rates.prefill_tokens_per_s if rates.prefill_tokens_per_s > 0.0 else float("inf")


def offload_s(num_bytes: int, rates: MeasuredRates) -> float:
    """Time to copy `num_bytes` bytes out and in again; infinite while a rate is unknown."""
    if rates.offload_bytes_per_s <= 0.0 or rates.load_bytes_per_s <= 0.0:
        return float("inf")
    return num_bytes / rates.offload_bytes_per_s + num_bytes / rates.load_bytes_per_s


def prefers_offload(num_tokens: int, num_bytes: int, rates: MeasuredRates) -> bool:
    """Whether saving `num_bytes` costs less than computing `num_tokens` again; recompute wins a tie, or in doubt."""
    return offload_s(num_bytes, rates) < recompute_s(num_tokens, rates)


class TierCosts:
    """Measured rates of one worker and the decisions that follow from them."""

    __slots__ = ("_block_bytes", "_block_tokens", "_read_s_per_byte", "_refusals", "rates")

    def __init__(self, *, block_bytes: int, block_tokens: int) -> None:
        self.rates = MeasuredRates()
        self._block_bytes = block_bytes
        self._block_tokens = block_tokens
        self._read_s_per_byte: float | None = None
        self._refusals = 0

    def set_copy_rates(self, rates: CopyRates) -> None:
        """Set the measured rates of copying blocks to and from host memory."""
        self.rates = replace(
            self.rates, offload_bytes_per_s=rates.offload_bytes_per_s, load_bytes_per_s=rates.load_bytes_per_s
        )

    def set_prefill_rate(self, prefill_tokens_per_s: float) -> None:
        """Set the measured prefill rate."""
        if prefill_tokens_per_s != self.rates.prefill_tokens_per_s:
            self.rates = replace(self.rates, prefill_tokens_per_s=prefill_tokens_per_s)

    def record_read(self, num_bytes: int, seconds: float) -> None:
        """Record the time of reading one block from disk, checksum included."""
        each = seconds / max(1, num_bytes)
        mean = self._read_s_per_byte
        self._read_s_per_byte = each if mean is None else mean + _WEIGHT * (each - mean)

    @property
    def read_bytes_per_s(self) -> float:
        """Read rate of the disk; 0 before the first read."""
        return 1.0 / self._read_s_per_byte if self._read_s_per_byte else 0.0

    def prefers_store(self) -> bool:
        """Whether copying a block out and in again costs less than computing its tokens."""
        return prefers_offload(self._block_tokens, self._block_bytes, self.rates)

    def prefers_load(self) -> bool:
        """Whether loading a block from host memory costs less than computing its tokens."""
        return self._load_s() < recompute_s(self._block_tokens, self.rates)

    def prefers_fetch(self) -> bool:
        """Whether reading and loading a block costs less than computing it; now and then true anyway, to probe."""
        read_s = 0.0 if self._read_s_per_byte is None else self._block_bytes * self._read_s_per_byte
        if read_s + self._load_s() < recompute_s(self._block_tokens, self.rates):
            return True
        self._refusals = (self._refusals + 1) % _PROBE_EVERY
        return self._refusals == 0

    def patience_s(self, num_blocks: int) -> float:
        """Longest time to wait for `num_blocks` blocks: about as long as computing them takes, within bounds."""
        return min(MAX_WAIT_S, max(MIN_WAIT_S, recompute_s(num_blocks * self._block_tokens, self.rates)))

    def _load_s(self) -> float:
        rate = self.rates.load_bytes_per_s
        return self._block_bytes / rate if rate > 0.0 else float("inf")
