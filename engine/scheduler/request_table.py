"""Holds every request of a worker by state (waiting, running, held) and counts the backlog of tokens."""

from engine.scheduler.request_queue import Deadlines, Ranking, RequestQueue
from engine.types.request import Request, RequestState
from tandem.errors import InvariantError
from tandem.values.ids import RequestId


class RequestTable:
    """Moves requests between the queues; knows nothing of blocks."""

    def __init__(self, rank: Ranking) -> None:
        self.rank = rank
        self.requests: dict[RequestId, Request] = {}
        self.waiting = RequestQueue(rank)
        self.running = RequestQueue(rank)
        self.deadlines = Deadlines()
        self.backlog_tokens = 0
        """Known tokens still to compute, waiting and running; counted incrementally."""

    @property
    def num_held(self) -> int:
        """Finished prefills whose blocks wait for a hand-off."""
        return len(self.requests) - len(self.waiting) - len(self.running)

    def enter(self, request: Request) -> None:
        """Add a request; it runs at once if it brings its KV along."""
        self.requests[request.request_id] = request
        self.backlog_tokens += request.num_uncomputed_tokens
        if len(request.block_table):
            request.move_to(RequestState.RUNNING)
            self.running.add(request)
        else:
            self._wait(request)

    def admit(self, request: Request) -> None:
        """Move an admitted request, which has its blocks and perhaps a prefix in them, to running."""
        self._stop_waiting(request)
        request.move_to(RequestState.RUNNING)
        self.running.add(request)
        self.backlog_tokens -= request.num_computed_tokens

    def requeue(self, request: Request) -> None:
        """Move a preempted request, which has lost its blocks, back to waiting."""
        self.running.remove(request)
        self.backlog_tokens += request.num_computed_tokens
        request.num_computed_tokens = 0
        request.move_to(RequestState.WAITING)
        self._wait(request)

    def hold(self, request: Request) -> None:
        """Hold a request whose prefill is done: it keeps its blocks and computes nothing more."""
        self.running.remove(request)
        self.backlog_tokens -= request.num_uncomputed_tokens
        request.move_to(RequestState.HELD)

    def leave(self, request: Request) -> None:
        """Forget a finished request."""
        if request.state is RequestState.WAITING:
            self._stop_waiting(request)
        elif request.state is RequestState.RUNNING:
            self.running.remove(request)
        if request.state is not RequestState.HELD:
            self.backlog_tokens -= request.num_uncomputed_tokens
        request.move_to(RequestState.FINISHED)
        del self.requests[request.request_id]

    def _wait(self, request: Request) -> None:
        self.waiting.add(request)
        self.deadlines.watch(request)

    def _stop_waiting(self, request: Request) -> None:
        self.waiting.remove(request)
        self.deadlines.forget(request)

    def check_invariants(self) -> None:
        """InvariantError unless the count of the backlog is right; O(requests), for tests and audits."""
        behind = sum(request.num_uncomputed_tokens for queue in (self.waiting, self.running) for request in queue)
        if behind != self.backlog_tokens:
            raise InvariantError(f"requests are {behind} tokens behind, {self.backlog_tokens} are counted")
