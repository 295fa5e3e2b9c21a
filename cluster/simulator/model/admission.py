"""Admission of the simulated router, by production's own `FairAdmission`.

`router.dispatch.admission_queue` drives it with futures and timers; here this happens on the virtual clock, at the same
moments: requests are admitted when a request is placed, has its first token or ends, when a worker reports its load,
joins or leaves, and every tenth of a second while any request waits. Rejected requests do not come back.
"""

from collections.abc import Callable

from cluster.simulator.model.event_queue import EventQueue
from cluster.simulator.model.request import SimRequest
from router.admission.fair_admission import FairAdmission
from router.admission.types import AdmissionEntry, AdmissionRequest
from tandem.errors import ServingError

_LOOK_S = 0.1
_TENANT = "simulated"
"""Tenant of all requests, as traces do not state any."""


class SimAdmission:
    def __init__(
        self,
        events: EventQueue,
        fair: FairAdmission,
        *,
        run: Callable[[SimRequest], None],
        refused: Callable[[SimRequest], None],
    ) -> None:
        """`run` places a request on workers, or lets it wait for room; `refused` ends it with an error."""
        self.fair = fair
        self._events = events
        self._run = run
        self._refused = refused
        self._line: dict[AdmissionEntry, SimRequest] = {}
        self._is_looking = False

    def enter(self, request: SimRequest) -> None:
        """Queue a request: it is admitted now or later, or rejected."""
        wanted = request.wanted
        try:
            entry, evicted = self.fair.enter(
                AdmissionRequest(
                    tenant=_TENANT,
                    priority=0,
                    num_tokens=wanted.num_prompt_tokens,
                    max_output_tokens=wanted.num_output_tokens,
                    deadline_s=None,
                )
            )
        except ServingError:
            self._refused(request)
            return
        request.entry = entry
        self._report_refusals(evicted)
        if not entry.waiting:
            self._go(request, entry)
            self.pump()
            return
        self._line[entry] = request
        if not self._is_looking:
            self._look_later()

    def answered(self, request: SimRequest) -> None:
        """Record a request's first token: there may be room for another request."""
        if request.entry is not None:
            self.fair.generated(request.entry, 1)
            self.pump()

    def end(self, request: SimRequest, *, num_tokens: int) -> None:
        """Record a request's end after so many tokens; its cached tokens count if it had its whole answer."""
        if (entry := request.entry) is None:
            return
        self.fair.generated(entry, max(0, num_tokens - entry.output_tokens))
        if num_tokens == request.wanted.num_output_tokens and request.cached_tokens is not None:
            self.fair.cached(entry, request.cached_tokens)
        self.fair.end(entry)
        self.pump()

    def pump(self) -> None:
        """Run the requests that are admitted now."""
        while self.fair.num_waiting and (turns := self.fair.pump()):
            for entry in turns:
                self._go(self._line.pop(entry), entry)

    def _go(self, request: SimRequest, entry: AdmissionEntry) -> None:
        self._run(request)
        self.fair.placed(entry)

    def _look_later(self) -> None:
        self._is_looking = True
        self._events.after(_LOOK_S, self._look)

    def _look(self) -> None:
        self._is_looking = False
        self.pump()
        self._report_refusals(self.fair.end_hopeless())
        if self.fair.num_waiting:
            self._look_later()

    def _report_refusals(self, refused: list[tuple[AdmissionEntry, ServingError]]) -> None:
        for entry, _error in refused:
            self._refused(self._line.pop(entry))
