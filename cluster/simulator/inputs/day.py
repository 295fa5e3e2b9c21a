"""A day of load from traces of an hour: the requests come from the traces, the rate over time from a daily curve.

There are two kinds of requests: chat, with its peak rate in the afternoon, and long prompts, with their peak rate in
the evening, so that the best ratio of the pools differs between night and day. A surge of chat comes on top, which no
curve predicts. The times between arrivals keep the traces' burstiness: a trace's clock is warped, not redrawn.
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
"""Bytes of a name that state the kind of request and the replay of its trace: replayed requests share no blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Request rate of one kind over the day."""

    mean: float
    swing: float
    """Swing as a share of the mean: the rate varies from `mean * (1 - swing)` to `mean * (1 + swing)`."""
    peak_h: float
    surge: float = 0.0
    """Additional share of the rate during the surge."""
    surge_from_h: float = 10.5
    surge_h: float = 0.75

    def at(self, hour: float) -> float:
        """Return the rate at a time of day, in requests per second."""
        rate = self.mean * (1.0 + self.swing * cos(2.0 * pi * (hour - self.peak_h) / HOURS))
        in_surge = self.surge_from_h <= hour < self.surge_from_h + self.surge_h
        return rate * (1.0 + self.surge) if in_surge else rate


@dataclass(frozen=True, slots=True, kw_only=True)
class DaySpec:
    """Parameters of a day."""

    hour_s: float = 3600.0
    """Seconds per hour of the curves: a shorter hour makes everything change faster, and is cheaper to run."""
    chat: Curve = Curve(mean=2.0, swing=0.65, peak_h=15.0, surge=0.4)
    long: Curve = Curve(mean=0.5, swing=0.5, peak_h=21.0)
    longest_prompt: int = 8_192
    """Maximum prompt length in tokens; longer prompts of the traces are left out."""
    block_tokens: int = 512

    @property
    def day_s(self) -> float:
        return HOURS * self.hour_s


def day_trace(spec: DaySpec, chat: Trace, long: Trace) -> Trace:
    """Combine both kinds in order. Blocks of the day's size keep their names, others are shared with no one."""
    kinds = [(spec.chat, chat), (spec.long, long)]
    requests = [request for kind, (curve, trace) in enumerate(kinds) for request in _warped(spec, curve, trace, kind)]
    requests.sort(key=lambda request: request.arrival_s)
    name = f"day of {chat.name} and {long.name}"
    return Trace(name=name, block_tokens=spec.block_tokens, requests=tuple(requests))


def _warped(spec: DaySpec, curve: Curve, trace: Trace, kind: int) -> list[TraceRequest]:
    """Repeat the trace's requests as often as needed, with arrivals warped to follow the curve."""
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
    """Return times and the cumulative number of requests by then."""
    hours = np.linspace(0.0, HOURS, HOURS * _STEPS_PER_HOUR + 1)
    rates = np.array([curve.at(float(hour)) for hour in hours[:-1]])
    totals = np.concatenate([[0.0], np.cumsum(rates * spec.hour_s / _STEPS_PER_HOUR)])
    return hours * spec.hour_s, totals


def _marks(requests: Sequence[TraceRequest]) -> np.ndarray:
    """Return the trace's arrivals on a clock that advances by one per request, from 0 to their number."""
    times = np.array([request.arrival_s for request in requests])
    span_s = float(times[-1] - times[0]) or 1.0
    marks: np.ndarray = (times - times[0]) * (len(times) - 1) / span_s
    return marks


def _renamed(names: Sequence[BlockHash], number: int) -> tuple[BlockHash, ...]:
    mark, end = number.to_bytes(_LAP_BYTES, "big"), _LAP_AT + _LAP_BYTES
    return tuple(BlockHash(name[:_LAP_AT] + mark + name[end:]) for name in names)
