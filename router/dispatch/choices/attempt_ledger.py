"""Accounts for all attempts at one choice: time by phase, KV held, tokens computed more than once. Pure.

Phases add up over attempts. An attempt that its worker ends is recorded with that worker's figures. One that the router
ends, or whose worker is lost, has the figures that came with its first token plus what the router measured since;
without a first token its time belongs to no phase.
"""

from collections.abc import Callable

from router.types.session_events import AttemptStarted
from tandem.values.outputs import NO_CACHED_TOKENS, NO_PREDICTION_USE, PhaseTimes, PredictionUse


class AttemptLedger:
    def __init__(self, *, prompt_length: int, clock: Callable[[], float], arrived_s: float | None = None) -> None:
        """`arrived_s`: when the request arrived, on `clock`; None: now."""
        self._prompt_length = prompt_length
        self._clock = clock
        self._since_s = clock() if arrived_s is None else arrived_s
        self._spent: PhaseTimes | None = None
        """The attempts that have ended, without `_waited_s`."""
        self._waited_s = 0.0
        self._runs = False
        self._kv_bytes_per_token = 0
        self._num_given = 0
        self._heard: tuple[AttemptStarted, float] | None = None
        self.first: AttemptStarted | None = None
        """The start of the first attempt, with the prompt's cache hits; later attempts also hit what it computed."""
        self.computed_tokens = 0
        """Tokens computed by all attempts: prompts and given output that were not cached, and new output."""
        self._prediction_before = NO_PREDICTION_USE
        self._prediction_now = NO_PREDICTION_USE

    def begin(self, num_given: int, kv_bytes_per_token: int = 0) -> None:
        """Start an attempt on a worker, given the `num_given` tokens of the answer that the client has."""
        now_s = self._clock()
        self._waited_s += now_s - self._since_s
        self._since_s, self._runs, self._heard = now_s, True, None
        self._num_given, self._kv_bytes_per_token = num_given, kv_bytes_per_token
        self._prediction_before, self._prediction_now = self.prediction, NO_PREDICTION_USE

    def refused(self) -> None:
        """Discard a refused attempt: its time counts as waiting."""
        self._runs = False

    def on_started(self, started: AttemptStarted) -> None:
        """Record the attempt's first token, or its progress so far."""
        self._heard = (started, self._clock())
        self.first = self.first or started
        self.computed_tokens += max(0, self._prompt_length + self._num_given - started.cached_tokens)

    def on_prediction(self, use: PredictionUse) -> None:
        """Record what has become of the request's prediction in this attempt, up to the latest tokens."""
        self._prediction_now = use

    @property
    def prediction(self) -> PredictionUse:
        """What has become of the request's prediction. Of a lost attempt, what came with tokens that the client has:
        those that a later attempt generates again are counted there.
        """
        return self._prediction_before.plus(self._prediction_now)

    def ended(self, num_tokens: int, times: PhaseTimes | None = None) -> None:
        """End the attempt with `num_tokens` of the answer. `times`: as its worker reported; None: estimate them."""
        if not self._runs:
            return
        now_s, self._runs = self._clock(), False
        if times is None:
            times = self._seen(now_s, num_tokens)
        self.computed_tokens += num_tokens - self._num_given
        self._spent = times if self._spent is None else self._spent.plus(times)
        self._since_s = now_s

    def _seen(self, now_s: float, num_tokens: int) -> PhaseTimes:
        if self._heard is None:
            return PhaseTimes()
        started, since_s = self._heard
        held = self._prompt_length + (self._num_given + num_tokens) / 2
        times, decode_s = started.times, now_s - since_s
        kv_byte_s = times.kv_byte_s + held * self._kv_bytes_per_token * decode_s
        return times._replace(decode_s=decode_s, kv_byte_s=kv_byte_s)

    def total(self) -> PhaseTimes:
        spent = self._spent or PhaseTimes()
        cached = NO_CACHED_TOKENS if self.first is None else self.first.times.cached
        return spent._replace(router_queue_s=spent.router_queue_s + self._waited_s, cached=cached)
