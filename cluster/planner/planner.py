"""Decides the sizes of both pools each period, from a forecast and the staffing formulas, with hysteresis.

Pools grow at once, by flips first: a worker that its own pool could have spared for `flip_hold_s` changes pools in
seconds, while a new machine takes minutes. Pools shrink only once the smaller size would have sufficed throughout
`hold_s`. So a steady load causes no action, and a load that swings within that time is served at its peaks. What would
have sufficed is known only for observed time: after a gap, as at the start, that time begins again.

Besides the forecast, the planner uses the observed KV usage of decode workers. Crowds that no rate predicts fill the KV
half a minute before a first token is late, which is as long as a machine takes to start.
"""

from collections import deque
from dataclasses import dataclass
from math import ceil, inf

from cluster.planner.forecast import Forecaster, Smoothing
from cluster.planner.staffing import Staffing
from cluster.planner.values import Action, ActionKind, Decision, Demand, FleetView, Observation, PlannerPolicy, Sizes
from cluster.planner.values import other as other_pool
from tandem.values.roles import WorkerRole

_ROLES = (WorkerRole.DECODE, WorkerRole.PREFILL)
"""Decode first where only one can be served: without room there, no prompt is started."""
_REMEMBERED_PERIODS = 20
"""Periods over which the mix of requests is averaged."""
_JUDGED_PERIODS = 60
"""Periods over which late first tokens are counted."""
_CARE = 10.0
"""Increase of the assumed load for each share of first tokens that is late beyond the allowance."""
_BUDGET_PERIODS = 1000
_BUDGET_LEAST = 2000
"""Minimum number of first tokens that the budget is a share of."""
_BUDGET_SPENT = 0.5
"""Share of the budget of late first tokens from which on more capacity is planned, so that the rest lasts."""
_BUDGET_CARE = 20.0
"""Increase of the assumed load for each share of the budget spent beyond that."""
_MOST_CARE = 0.4
_FULL = 0.9
"""Share of the decode workers' KV beyond which another worker is added, whatever the formulas say."""
_ROOMY = 0.65
"""Share of KV that may be in use with one decode worker fewer: workers leave before the crowd comes."""
_GAP_PERIODS = 2.5
"""Periods without an observation after which it is unknown what would have sufficed."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    at_s: float
    sizes: Sizes


class _LateShare:
    """Share of first tokens that were late, over a number of periods with decaying weights."""

    def __init__(self, periods: int) -> None:
        self._kept = 1.0 - 1.0 / periods
        self._num_late = self._num_first = 0.0

    def add(self, seen: Observation) -> None:
        self._num_late = self._kept * self._num_late + seen.num_late
        self._num_first = self._kept * self._num_first + seen.num_first

    def share(self, *, least: float = 1.0) -> float:
        """Return the share, as if there had been at least so many first tokens."""
        return self._num_late / max(self._num_first, least)


class Planner:
    """Plans one cluster. Call `decide` once per period, with what happened in it and the present fleet."""

    def __init__(self, staffing: Staffing, policy: PlannerPolicy, *, period_s: float, season_s: float = 0.0) -> None:
        self.policy = policy
        self._staffing = staffing
        self._gap_s = _GAP_PERIODS * period_s
        self._ahead = max(1, ceil(policy.start_s / period_s) + 1)
        self._rate = Forecaster(Smoothing(), ahead=self._ahead, season=round(season_s / period_s))
        self._mix = Demand()
        self._lately, self._budget = _LateShare(_JUDGED_PERIODS), _LateShare(_BUDGET_PERIODS)
        self._taken_pools = 0.0
        """KV in use on decode workers now, in pools."""
        self._history: deque[_Wanted] = deque()
        self._settled_at_s = -inf
        """Time of the last flip or reduction."""
        self._held_from_s = -inf
        """Start of the uninterrupted observation of what would have sufficed."""

    def hold(self, now_s: float) -> None:
        """Take no worker from a pool for a full hold time from now on: someone else changed the sizes."""
        self._held_from_s = now_s

    def decide(self, now_s: float, seen: Observation, fleet: FleetView) -> Decision:
        """Decide what to do with the machines now."""
        watched = self.watch(now_s, seen)
        actions, reasons = self._act(now_s, watched.wanted, fleet)
        return Decision(actions=tuple(actions), wanted=watched.wanted, reasons=(*watched.reasons, *reasons))

    def watch(self, now_s: float, seen: Observation) -> Decision:
        """Return what would be right when nothing can be done now; the history continues as usual."""
        self._mix = self._mix.plus(seen.demand, kept=1.0 - 1.0 / _REMEMBERED_PERIODS)
        self._rate.observe(seen.demand.num_requests / seen.period_s)
        self._taken_pools = seen.taken_pools
        required, why = self._required(seen)
        # A crowd is not remembered: workers added for it may leave as soon as the others have room.
        self._remember(now_s, self._bounded(required))
        crowd = self._crowded(seen, required)
        if crowd != required:
            why += f", {seen.taken_pools:.2f} pools of KV used on {seen.num_decoding} decode workers require {crowd}"
        wanted = self._bounded(crowd)
        return Decision(
            actions=(), wanted=wanted, reasons=(why + (f", bounded to {wanted}" if wanted != crowd else ""),)
        )

    def _required(self, seen: Observation) -> tuple[Sizes, str]:
        """Return the sizes for the most demanding moment between now and when a machine ordered now would serve."""
        policy, band = self.policy, self.policy.band
        rate = max(self._rate.ahead(0).upper(0.0), self._rate.ahead(self._ahead).upper(band))
        rate *= self._care(seen)
        sizes = self._staffing.sizes(rate, self._mix, backlog_s=self._overdue_s(seen), most=policy.most_workers)
        return sizes, f"{rate:.2f} requests/s forecast require {sizes}"

    @staticmethod
    def _crowded(seen: Observation, required: Sizes) -> Sizes:
        """Return one more decode worker than now if those are full; the next period checks again."""
        if seen.taken_pools <= _FULL * seen.num_decoding:
            return required
        return Sizes(prefill=required.prefill, decode=max(required.decode, seen.num_decoding + 1))

    def _care(self, seen: Observation) -> float:
        """Return the factor by which to plan for more than the forecast; 1 while objectives are met with a margin.

        The formulas are approximate. When more first tokens are late than allowed, the load is assumed to be larger;
        the same applies, less strongly and for longer, when much of the long-term allowance is spent.
        """
        self._lately.add(seen)
        self._budget.add(seen)
        allowed = self._staffing.targets.late_share
        excess = max(0.0, self._lately.share() - allowed)
        spent = max(0.0, self._budget.share(least=_BUDGET_LEAST) - _BUDGET_SPENT * allowed)
        return 1.0 + min(_MOST_CARE, _CARE * excess + _BUDGET_CARE * spent)

    def _overdue_s(self, seen: Observation) -> float:
        """Return the waiting work that is no stationary queue: what the TTFT objective's time cannot clear."""
        return max(0.0, seen.waiting_prompt_seconds - self._staffing.targets.ttft_s)

    def _bounded(self, sizes: Sizes) -> Sizes:
        policy = self.policy
        prefill, decode = max(sizes.prefill, policy.least.prefill), max(sizes.decode, policy.least.decode)
        while prefill + decode > policy.most_workers:
            # In proportion, as far as the minimum sizes allow.
            if prefill > policy.least.prefill and (prefill >= decode or decode <= policy.least.decode):
                prefill -= 1
            else:
                decode -= 1
        return Sizes(prefill=prefill, decode=decode)

    def _remember(self, now_s: float, wanted: Sizes) -> None:
        if not self._history or now_s - self._history[-1].at_s > self._gap_s:
            self._held_from_s = now_s
        self._history.append(_Wanted(now_s, wanted))
        longest_s = max(self.policy.hold_s, self.policy.flip_hold_s)
        while self._history[0].at_s < now_s - longest_s:
            self._history.popleft()

    def _enough(self, role: WorkerRole, now_s: float, hold_s: float) -> float:
        """Return the workers that would have sufficed for a pool all this time, including for what it has in hand.

        Any number may have been needed while nothing was observed.
        """
        if now_s - self._held_from_s < hold_s:
            return inf
        past = max(past.sizes.size_of(role) for past in self._history if past.at_s >= now_s - hold_s)
        return max(past, ceil(self._taken_pools / _ROOMY)) if role is WorkerRole.DECODE else past

    def _act(self, now_s: float, wanted: Sizes, fleet: FleetView) -> tuple[list[Action], list[str]]:
        sizes, actions, reasons = fleet.sizes, list[Action](), list[str]()
        may_settle = now_s - self._settled_at_s >= self.policy.cooldown_s
        for role in _ROLES:
            while sizes.size_of(role) < wanted.size_of(role):
                action = self._gain(role, now_s, sizes, actions, may_settle=may_settle)
                if action is None:
                    reasons.append(
                        f"{role.value} lacks {wanted.size_of(role) - sizes.size_of(role)}: maximum workers reached"
                    )
                    break
                sizes = sizes.changed(role, 1)
                if action.kind is ActionKind.FLIP:
                    sizes = sizes.changed(other_pool(role), -1)
                reasons.append(f"{action}: {role.value} needs {wanted.size_of(role)}")
                actions.append(action)
        if may_settle and not actions:
            actions, more = self._give_up(now_s, sizes)
            reasons += more
        if any(action.kind is not ActionKind.START for action in actions):
            self._settled_at_s = now_s
        return actions, reasons

    def _gain(
        self, role: WorkerRole, now_s: float, sizes: Sizes, actions: list[Action], *, may_settle: bool
    ) -> Action | None:
        """Add a worker to a pool: a warm one of the other pool, else a new one, else none."""
        policy, donor = self.policy, other_pool(role)
        num_flips = sum(action.kind is ActionKind.FLIP for action in actions)
        spare = sizes.size_of(donor) - self._enough(donor, now_s, policy.flip_hold_s)
        if (
            may_settle
            and spare > 0
            and num_flips < policy.most_flips
            and sizes.size_of(donor) > policy.least.size_of(donor)
        ):
            return Action(kind=ActionKind.FLIP, role=role)
        if sizes.total < policy.most_workers:
            return Action(kind=ActionKind.START, role=role)
        return None

    def _give_up(self, now_s: float, sizes: Sizes) -> tuple[list[Action], list[str]]:
        """Give up one worker that its pool could have spared all along; the other pool waits for the next period."""
        held_s = self.policy.hold_s
        for role in _ROLES:
            enough = max(self.policy.least.size_of(role), self._enough(role, now_s, held_s))
            if sizes.size_of(role) > enough:
                reason = f"stop {role.value}: {enough:g} would have been enough for {held_s:g} s"
                return [Action(kind=ActionKind.STOP, role=role)], [reason]
        return [], []
