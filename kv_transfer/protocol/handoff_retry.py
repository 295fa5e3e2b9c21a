"""Tracks one hand-off through its attempts: the decode worker's side of retries (pure).

The router chooses the next peer; this module decides what is still missing. Each attempt has its own destinations, so
that a new one can start while the writer of an old one is still being proven quiet. Landed whole blocks become part
of the held prefix, and a first token that was forwarded once is never sampled again.
"""

from dataclasses import replace

from kv_transfer.protocol import guards
from kv_transfer.protocol.leases import Lease
from kv_transfer.protocol.messages import PrefillJob, TransferKey
from kv_transfer.protocol.receiver import Receiver, ReceiverPlan
from kv_transfer.protocol.settings import TransferSettings
from tandem.errors import TransferError
from tandem.values.ids import Incarnation
from tandem.values.kv_layout import KVLayout


class HandoffRetry:
    """State of one hand-off that outlives its attempts."""

    def __init__(self, job: PrefillJob, *, own: Incarnation, layout: KVLayout, settings: TransferSettings) -> None:
        """`own`: this process's incarnation."""
        self.job = job
        """The job that remains: `held_tokens` and `resume` change as attempts succeed in part."""
        self.ended = False
        """Whether the hand-off is committed, cancelled or expired: no attempt will follow."""
        self._own = own
        self._layout = layout
        self._settings = settings
        self._newest: int | None = None
        self._waiting: Lease | None = None
        self._started_s: float | None = None

    @property
    def newest_attempt(self) -> int | None:
        """The attempt whose events count; those of others are stale."""
        return self._newest

    @property
    def waiting(self) -> bool:
        """Whether the last attempt failed and the router has not named another peer yet."""
        return self._waiting is not None

    def begin(self, attempt: int, peer: Incarnation, now: float) -> Receiver:
        """Start an attempt with `peer`. Raises TransferError when it comes too late or too early."""
        if self.ended or guards.superseded(attempt, self._newest):
            raise TransferError(f"attempt {attempt} of this hand-off is stale")
        if self._newest is not None and self._waiting is None:
            raise TransferError(f"attempt {self._newest} of this hand-off is still under way")
        if self._started_s is None:
            self._started_s = now
        self._newest = attempt
        self._waiting = None
        plan = ReceiverPlan(
            key=TransferKey(transfer_id=self.job.transfer_id, attempt=attempt),
            own=self._own,
            peer=peer,
            job=self._job_at(now - self._started_s),
            layout=self._layout,
            lease_s=self._settings.lease_s,
            stall_s=self._settings.stall_s,
            queue_s=self._settings.queue_s,
            drain_s=self._settings.drain_s,
            max_rewrites=self._settings.max_rewrites,
        )
        return Receiver(plan, now)

    def _job_at(self, elapsed_s: float) -> PrefillJob:
        if self.job.timeout_s is None:
            return self.job
        return replace(self.job, timeout_s=max(0.0, self.job.timeout_s - elapsed_s))

    def first_token_known(self) -> None:
        """Record the first token: every later attempt only computes KV."""
        self.job = replace(self.job, resume=True)

    def failed(self, num_landed: int, now: float) -> None:
        """End the newest attempt; its first `num_landed` blocks are held now, under a lease."""
        held_tokens = self.job.held_tokens + num_landed * self._layout.block_size
        self.job = replace(self.job, held_tokens=held_tokens)
        self._waiting = Lease(self._settings.reroute_s, now)

    def end(self) -> None:
        """End the hand-off: no attempt will follow."""
        self.ended = True
        self._waiting = None

    def expired(self, now: float) -> bool:
        """Whether the router named no other peer in time."""
        return self._waiting is not None and self._waiting.expired(now)
