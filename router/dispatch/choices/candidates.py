"""Which worker a choice may be put on next, and what it waits for when there is none. Pure."""

from router.dispatch.choices.context import DispatchContext, Waiting
from router.dispatch.choices.health_reports import ChoiceHealthReporter
from router.dispatch.choices.orders import block_names
from router.dispatch.choices.retry import ChoiceProgress
from router.placement.place import NoDecodeWorker
from router.placement.placer import Assignment
from router.types.worker_view import WorkerKey
from tandem.errors import RequestTooLarge
from tandem.values.ids import BlockHash


class WorkerSelector:
    """Of one run of a choice."""

    def __init__(
        self, standing: ChoiceHealthReporter, progress: ChoiceProgress, names: list[BlockHash], context: DispatchContext
    ) -> None:
        """`names`: of the prompt's blocks."""
        self._standing = standing
        self._request = standing.request
        self._progress = progress
        self._prompt_names = names
        self._context = context
        self._registry = context.placer.registry

    def choose(self) -> Assignment:
        """The best. Raises NoDecodeWorker, or RequestTooLarge for every one of them."""
        excluded, shunned = self._excluded(), self._standing.shunned()
        if (only := self._request.only_worker) is not None:
            excluded |= {w.info.key for w in self._registry.snapshots()} - {only}
        try:
            return self._choose_without(excluded | shunned)
        except NoDecodeWorker:
            if not shunned:
                raise
            # Better one that may fail than none.
            return self._choose_without(excluded)

    def barred(self) -> frozenset[WorkerKey]:
        """Who is not to compute its prompt."""
        return frozenset(self._excluded() | self._standing.shunned())

    def to_wait_for(self, waiting: Waiting | None) -> Waiting | None:
        """No worker can be asked at the moment: what changes that, or None when nothing is expected to.

        `waiting`: what it has waited for until now.
        """
        full, live = self._progress.full, self._registry.live_decoders()
        if live & full:
            return Waiting.FOR_ROOM
        # Those it waited for have left: that is a loss like any other.
        if waiting is not None:
            return Waiting.FOR_WORKER
        # Those that serve have failed it, and another would hardly do better. Who is full and not live is leaving.
        if live and not full and self._progress.last_error is not None:
            return None
        if self._request.only_worker is None and self._registry.worker_due_s() > 0.0:
            return Waiting.FOR_WORKER
        return None

    def _excluded(self) -> set[WorkerKey]:
        return self._progress.still_excluded(self._registry.port)

    def _choose_without(self, excluded: set[WorkerKey]) -> Assignment:
        progress = self._progress
        try:
            return self._context.placer.assign(
                num_tokens=progress.prompt_length + len(progress.token_ids),
                names=block_names(self._request, self._prompt_names, progress.token_ids, self._context.hasher),
                excluded=frozenset(excluded),
                pool_tokens_above=progress.pool_tokens_above,
                is_local=self._request.is_local and not progress.token_ids,
            )
        except RequestTooLarge as computed:
            # The worker that refused it for its size has said more precisely why.
            told = progress.last_error
            raise told if isinstance(told, RequestTooLarge) else computed from None
