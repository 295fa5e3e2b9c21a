"""Sending ends that write into a receiver's memory by themselves: claim a grant, write, and report when done."""

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports.one_sided import wire as one_sided_wire
from kv_transfer.transports.one_sided.receiver import hang_up
from kv_transfer.transports.one_sided.wire import ClaimKind
from kv_transfer.transports.write_queue import QueuedWriter, WriteJob
from tandem.errors import TransferError

CLAIM_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class GrantClaim:
    """A grant that this writer has claimed; changed under the queue's lock."""

    key: TransferKey
    granted: "Future[bool]" = field(default_factory=Future)
    busy: set[WriteJob] = field(default_factory=set)
    """Jobs whose bytes are in flight, which no lock can stop."""
    ending: bool = False
    """Whether to give the claim up once it is no longer busy."""

    def settle(self, granted: bool) -> None:
        with suppress(InvalidStateError):
            self.granted.set_result(granted)


class ClaimingWriter(QueuedWriter):
    """Base of the PeerWriters that claim grants; `sock` is connected, has sent HELLO, and is owned by the writer."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        self._sock = sock
        self._claims: dict[bytes, GrantClaim] = {}
        self._unanswered: Counter[bytes] = Counter()
        """CLAIMs by token. Of several, all but the last were given up again, and their answers say nothing."""
        self._tokens: dict[TransferKey, bytes] = {}
        super().__init__(f"kv-{name}-write")
        self._reader = threading.Thread(target=self._read, name=f"kv-{name}-read", daemon=True)
        self._reader.start()

    def cancel(self, key: TransferKey) -> bool:
        """Stop the attempt's writes; QUIET tells the receiver when none is in flight any more."""
        stopped = super().cancel(key)
        with self._queue.lock:
            token = self._tokens.get(key)
            said = token is None or self._give_up(token)
        if not said:
            self._break("the receiver does not read")
        return stopped

    def close(self) -> None:
        """Stop writing, then close the socket: its end tells the receiver that nothing is written any more."""
        self._break("connection closed")
        super().close()
        hang_up(self._sock)
        self._reader.join()
        self._sock.close()

    def _claim(self, job: WriteJob, token: bytes) -> None:
        """Claim the job's grant, once per grant; the receiver refuses revoked ones."""
        with self._queue.lock:
            job.check()
            claim = self._claims.get(token)
            if claim is None:
                claim = self._claims[token] = GrantClaim(key=job.order.key)
                self._tokens[job.order.key] = token
                self._unanswered[token] += 1
                if not one_sided_wire.send(self._sock, ClaimKind.CLAIM, token):
                    claim.settle(False)
        try:
            granted = claim.granted.result(CLAIM_S)
        except TimeoutError:
            raise TransferError("the receiver does not answer") from None
        if not granted:
            raise TransferError("unknown grant")

    @contextmanager
    def _under_way(self, job: WriteJob, token: bytes) -> Iterator[None]:
        """Context of writes that no lock can stop; ends once none of them is in flight, or shortly after the job was
        stopped."""
        claim = self._enter(job, token)
        try:
            yield
        finally:
            self._leave(job, token, claim)

    def _enter(self, job: WriteJob, token: bytes) -> GrantClaim:
        """Begin what `_under_way` describes; `_leave` ends it."""
        with self._queue.lock:
            claim = self._check(job, token)
            claim.busy.add(job)
            job.reading = True
        return claim

    def _leave(self, job: WriteJob, token: bytes, claim: GrantClaim) -> None:
        said = True
        with self._queue.lock:
            claim.busy.discard(job)
            job.reading = False
            # After an error some bytes may still be in flight: then only the end of the connection is a proof.
            if claim.ending and not claim.busy and not self._queue.failed:
                said = self._give_up(token)
        if not said:
            self._break("the receiver does not read")

    def _check(self, job: WriteJob, token: bytes) -> GrantClaim:
        job.check()
        claim = self._claims.get(token)
        if claim is None or claim.ending:
            raise TransferError("grant revoked")
        return claim

    def _read(self) -> None:
        try:
            while (message := one_sided_wire.receive(self._sock)) is not None:
                self._on_message(*message)
            reason = "the receiver has disconnected"
        except (OSError, TransferError) as error:
            reason = f"connection lost: {error}"
        self._break(reason)
        self._stopped()
        # Only now that everything has stopped may the receiver see the end.
        hang_up(self._sock)

    def _stopped(self) -> None:
        """Called on the reader's thread when the receiver has ended; on return nothing is written any more."""

    def _on_message(self, kind: ClaimKind, token: bytes) -> None:
        said = True
        with self._queue.lock:
            claim = self._claims.get(token)
            if kind is ClaimKind.REVOKE:
                said = self._give_up(token)
            elif not self._is_last_answer(token):
                claim = None
            elif kind is ClaimKind.REFUSED:
                self._forget(token)
        if claim is not None:
            claim.settle(kind is ClaimKind.CLAIMED)
        if not said:
            raise TransferError("the receiver does not read")

    def _is_last_answer(self, token: bytes) -> bool:
        """Note an answer, under the queue's lock; whether it is that to the last CLAIM of its token.

        An earlier one is still on its way when a claim was given up at once and made again. Taken for the later one's,
        it would allow writes of which the receiver, which has seen QUIET, does not know.
        """
        self._unanswered[token] -= 1
        if self._unanswered[token] > 0:
            return False
        del self._unanswered[token]
        return True

    def _give_up(self, token: bytes) -> bool:
        """Give a claim up, under the queue's lock: send QUIET now or, while a write is in flight, at its end.

        Returns False when QUIET could not be sent.
        """
        claim = self._claims.get(token)
        if claim is None:
            return True
        claim.settle(False)
        if claim.busy:
            claim.ending = True
            for job in claim.busy:
                job.stopped = True
            return True
        self._forget(token)
        return one_sided_wire.send(self._sock, ClaimKind.QUIET, token)

    def _forget(self, token: bytes) -> None:
        claim = self._claims.pop(token, None)
        if claim is not None:
            self._tokens.pop(claim.key, None)

    def _break(self, reason: str) -> None:
        self._queue.fail_all(reason)
        with self._queue.lock:
            claims = list(self._claims.values())
        for claim in claims:
            claim.settle(False)
