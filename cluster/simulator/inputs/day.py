"""A day of load out of traces of an hour: whose requests come is the traces', how many when is a day's curve.

Two kinds of requests: chat, whose rate is highest in the afternoon, and long prompts, whose rate is highest in the
evening, so that the ratio of the pools that is best is another one by night than by day. And a surge of chat that no
curve foretells. Times between arrivals keep the traces' own burstiness: a trace's clock is warped, not drawn anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import cos, pi

import numpy as np

from cluster.simulator.inputs.trace import Trace, TraceRequest
from tandem.errors import ConfigError
from tandem.values.ids import BlockHash

HOURS = 24
_STEPS_PER_HOUR = 60
_LAP_AT = 1
_LAP_BYTES = 2
"""Where a name says of which kind it is, and for which time its trace is replayed: what comes again is not the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One kind's requests a second, over the day."""

    mean: float
    swing: float
    """Of the mean: the highest rate is `mean * (1 + swing)`, the lowest `mean * (1 - swing)`."""
    peak_h: float
    surge: float = 0.0
    """Of the rate, besides, during the surge."""
    surge_from_h: float = 10.5
    surge_h: float = 0.75

    def at(self, hour: float) -> float:
        """The rate at a moment, in requests per second."""
        rate = self.mean * (1.0 + self.swing * cos(2.0 * pi * (hour - self.peak_h) / HOURS))
        in_surge = self.surge_from_h <= hour < self.surge_from_h + self.surge_h
        return rate * (1.0 + self.surge) if in_surge else rate


@dataclass(frozen=True, slots=True, kw_only=True)
class DaySpec:
    """What a day is made of."""

    hour_s: float = 3600.0
    """Seconds that an hour of the curves takes: a shorter one makes everything change faster, and costs less."""
    chat: Curve = Curve(mean=2.0, swing=0.65, peak_h=15.0, surge=0.4)
    long: Curve = Curve(mean=0.5, swing=0.5, peak_h=21.0)
    longest_prompt: int = 8_192
    """Tokens; requests of the traces with longer prompts are left out."""
    block_tokens: int = 512

    @property
    def day_s(self) -> float:
        return HOURS * self.hour_s


def day_trace(spec: DaySpec, chat: Trace, long: Trace) -> Trace:
    """Both kinds together, in order. Blocks of the day's size keep their names, others are nobody else's."""
    kinds = [(spec.chat, chat), (spec.long, long)]
    requests = [request for kind, (curve, trace) in enumerate(kinds) for request in _warped(spec, curve, trace, kind)]
    requests.sort(key=lambda request: request.arrival_s)
    name = f"day of {chat.name} and {long.name}"
    return Trace(name=name, block_tokens=spec.block_tokens, requests=tuple(requests))


def _warped(spec: DaySpec, curve: Curve, trace: Trace, kind: int) -> list[TraceRequest]:
    """The trace's requests as often as needed, their own clock bent so that they come as the curve says."""
    known = [r for r in trace.spread().requests if r.num_prompt_tokens <= spec.longest_prompt]
    if not known:
        raise ConfigError(f"{trace.name}: no prompt of at most {spec.longest_prompt} tokens")
    shares = trace.block_tokens == spec.block_tokens
    times, totals = _cumulated(spec, curve)
    marks = _marks(known)
    laps = int(totals[-1] // len(known)) + 1
    wanted = np.concatenate([marks + lap * len(known) for lap in range(laps)])
    arrivals = np.interp(wanted, totals, times)
    num_kept = int(np.searchsorted(wanted, totals[-1]))
    return [
        replace(
            known[number % len(known)],
            arrival_s=float(arrivals[number]),
            names=_renamed(known[number % len(known)].names, 2 * (number // len(known)) + kind) if shares else (),
            tail=number % 2**31,
        )
        for number in range(num_kept)
    ]


def _cumulated(spec: DaySpec, curve: Curve) -> "tuple[np.ndarray, np.ndarray]":
    """Times, and how many requests have come by then."""
    hours = np.linspace(0.0, HOURS, HOURS * _STEPS_PER_HOUR + 1)
    rates = np.array([curve.at(float(hour)) for hour in hours[:-1]])
    totals = np.concatenate([[0.0], np.cumsum(rates * spec.hour_s / _STEPS_PER_HOUR)])
    return hours * spec.hour_s, totals


def _marks(requests: Sequence[TraceRequest]) -> np.ndarray:
    """The trace's arrivals on a clock that ticks once for each request, from 0 to their number."""
    times = np.array([request.arrival_s for request in requests])
    span_s = float(times[-1] - times[0]) or 1.0
    marks: np.ndarray = (times - times[0]) * (len(times) - 1) / span_s
    return marks


def _renamed(names: Sequence[BlockHash], number: int) -> tuple[BlockHash, ...]:
    mark, end = number.to_bytes(_LAP_BYTES, "big"), _LAP_AT + _LAP_BYTES
    return tuple(BlockHash(name[:_LAP_AT] + mark + name[end:]) for name in names)
