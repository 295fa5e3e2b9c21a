"""Which worker reads a prompt: of the prefill pool, and of the other one only while that has none to offer. Pure."""

from collections.abc import Collection, Iterable

from router.types.worker_view import WorkerKey, WorkerSnapshot
from tandem.values.roles import WorkerRole

_TOKENS_PER_S = 1000.0
"""Of a worker that has measured nothing yet."""


def choose_scoring_worker(
    workers: Iterable[WorkerSnapshot],
    num_tokens: int,
    *,
    excluded: Collection[WorkerKey],
    shunned: Collection[WorkerKey],
    prefer: WorkerKey | None = None,
) -> WorkerSnapshot | None:
    """Who is predicted to have read it first; `shunned`: only if there is nobody else. None: nobody can.

    `prefer`: who has most of it cached.
    """
    fit = [
        worker
        for worker in workers
        if not worker.draining
        and worker.info.key not in excluded
        and num_tokens <= min(worker.info.max_model_len, worker.info.pool_tokens)
    ]

    def cost(worker: WorkerSnapshot) -> tuple[bool, bool, bool, float, str]:
        rate = worker.load.prefill_tokens_per_s or _TOKENS_PER_S
        wait_ms = 1e3 * (worker.backlog_tokens + num_tokens) / rate
        return (
            worker.info.key in shunned,
            worker.info.key != prefer,
            worker.info.role is not WorkerRole.PREFILL,
            wait_ms + worker.penalty_ms,
            worker.info.key.worker_id,
        )

    return min(fit, key=cost, default=None)
