"""The way to the simulated router: every request has its turn here first, by production's own `FairAdmission`.

What `router.dispatch.admission_queue` does around it with futures and timers is done here on the virtual clock, at the
same moments: looks for turns when a request is placed, has its first token or ends, when a worker reports its load,
joins or leaves, and every tenth of a second while somebody waits. Who is refused does not come back.
"""

from collections.abc import Callable

from cluster.simulator.model.event_queue import EventQueue
from cluster.simulator.model.request import SimRequest
from router.admission.fair_admission import FairAdmission
from router.admission.types import AdmissionEntry, AdmissionRequest
from tandem.errors import ServingError

_LOOK_S = 0.1
_TENANT = "simulated"
"""Traces do not say whose their requests are."""


class SimGate:
    def __init__(
        self,
        events: EventQueue,
        admission: FairAdmission,
        *,
        run: Callable[[SimRequest], None],
        refused: Callable[[SimRequest], None],
    ) -> None:
        """`run` writes a request into the workers' books, or lets it wait for room; `refused` tells its client."""
        self.admission = admission
        self._events = events
        self._run = run
        self._refused = refused
        self._line: dict[AdmissionEntry, SimRequest] = {}
        self._is_looking = False

    def enter(self, request: SimRequest) -> None:
        """Its turn comes now, later, or never."""
        wanted = request.wanted
        try:
            entry, evicted = self.admission.enter(
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
        self._tell(evicted)
        if not entry.waiting:
            self._go(request, entry)
            self.pump()
            return
        self._line[entry] = request
        if not self._is_looking:
            self._look_later()

    def answered(self, request: SimRequest) -> None:
        """Its first token came: there may be room for another."""
        if request.entry is not None:
            self.admission.generated(request.entry, 1)
            self.pump()

    def end(self, request: SimRequest, *, num_tokens: int) -> None:
        """It is over, after so many tokens; what of its prompt was cached is learnt if it had its whole answer."""
        if (entry := request.entry) is None:
            return
        self.admission.generated(entry, max(0, num_tokens - entry.output_tokens))
        if num_tokens == request.wanted.num_output_tokens and request.cached_tokens is not None:
            self.admission.cached(entry, request.cached_tokens)
        self.admission.end(entry)
        self.pump()

    def pump(self) -> None:
        """Those whose turn it is run."""
        while self.admission.num_waiting and (turns := self.admission.pump()):
            for entry in turns:
                self._go(self._line.pop(entry), entry)

    def _go(self, request: SimRequest, entry: AdmissionEntry) -> None:
        self._run(request)
        self.admission.placed(entry)

    def _look_later(self) -> None:
        self._is_looking = True
        self._events.after(_LOOK_S, self._look)

    def _look(self) -> None:
        self._is_looking = False
        self.pump()
        self._tell(self.admission.hopeless())
        if self.admission.num_waiting:
            self._look_later()

    def _tell(self, refused: list[tuple[AdmissionEntry, ServingError]]) -> None:
        for entry, _error in refused:
            self._refused(self._line.pop(entry))
