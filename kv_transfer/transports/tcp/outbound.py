"""`tcp`, sending end of one stream: one thread sends frames, another reads answers.

Sources are read under the queue's lock in non-blocking calls and checksummed immediately, while they are in the cache;
those on a device are gathered into host memory first, without the lock. A cancelled frame is padded with zeros, so that
the stream stays in step.
"""

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kv_transfer.layout.pairing import Pairing
from kv_transfer.memory.mover import Mover
from kv_transfer.memory.region import KVRegion
from kv_transfer.memory.socket_stream import StreamStep
from kv_transfer.transports.grants import TOKEN_BYTES
from kv_transfer.transports.tcp import frames as tcp_frames
from kv_transfer.transports.tcp.bursts import StreamPart
from kv_transfer.transports.tcp.channel import ByteChannel, flush, receive_exactly, send_exactly
from kv_transfer.transports.tcp.frames import FrameHeader, FrameKind
from kv_transfer.transports.tcp.payload import PayloadMaker
from kv_transfer.transports.write_queue import QueuedWriter, WriteJob
from tandem.errors import TransferError

_ZEROS = memoryview(bytes(256 << 10))


@dataclass(slots=True, kw_only=True, eq=False)
class _Frame:
    """A frame that is not answered yet; changed under the queue's lock."""

    write_id: int
    job: WriteJob
    num_bytes: int
    left: int
    checksum: int = 0


class TcpStream(QueuedWriter):
    """One stream of a TcpWriter, with its own queue. `broken` is called on any thread when the stream has ended."""

    def __init__(
        self,
        source: KVRegion,
        channel: ByteChannel,
        pairing: Pairing,
        *,
        seed: int,
        mover: Mover | None,
        stall_s: float,
        broken: Callable[[str], None],
    ) -> None:
        self._channel = channel
        self._seed = seed
        self._stall_s = stall_s
        self._broken = broken
        self._numbers = itertools.count(1)
        self._unanswered: deque[_Frame] = deque()
        super().__init__("kv-tcp-write")
        self._payloads = PayloadMaker(source, pairing, channel, self._queue.lock, mover)
        self._reader = threading.Thread(target=self._read, name="kv-tcp-read", daemon=True)

    def start(self) -> None:
        """Start to read answers; called once, before the first write."""
        self._reader.start()

    def fail(self, reason: str) -> None:
        """Stop every write and end the connection; on return only sources of still pending futures are read."""
        self._queue.fail_all(reason)
        self._channel.hang_up()

    def close(self) -> None:
        """See PeerWriter; called after `fail`."""
        super().close()
        self._reader.join()
        self._channel.close()

    def _perform(self, job: WriteJob) -> None:
        order = job.order
        if len(order.grant) != TOKEN_BYTES:
            raise TransferError("malformed grant")
        payload = self._payloads.make(order.source, order.cells, lambda: self._reading(job))
        job.check()
        frame = _Frame(write_id=next(self._numbers), job=job, num_bytes=payload.num_bytes, left=payload.num_bytes)
        header = FrameHeader(
            kind=FrameKind.WRITE,
            write_id=frame.write_id,
            token=order.grant,
            cells=order.cells,
            payload_bytes=payload.num_bytes,
        )
        self._unanswered.append(frame)
        try:
            send_exactly(self._channel, tcp_frames.pack_header(header, self._seed), stall_s=self._stall_s)
            self._send_payload(frame, payload.parcels)
            self._pad(frame)
            flush(self._channel, stall_s=self._stall_s)
        except (OSError, TransferError) as error:
            self._broken(f"tcp connection lost: {error}")
        finally:
            if frame.left:
                self._broken("a frame was not finished")

    @contextmanager
    def _reading(self, job: WriteJob) -> Iterator[None]:
        if self._payloads.are_on_device:
            try:
                with self._queue.reading(job):
                    yield
            except TransferError:
                if job.stopped:
                    raise _Stopped from None
                raise
            return
        with self._queue.lock:
            if job.stopped:
                raise _Stopped
            yield

    def _send_payload(self, frame: _Frame, parcels: Iterator[StreamPart]) -> None:
        """Send the payload, or the part that precedes a stop of the job."""
        try:
            for parcel in parcels:
                self._send_part(frame, parcel)
        except _Stopped:
            return

    def _send_part(self, frame: _Frame, parcel: StreamPart) -> None:
        left, progress = frame.left, StreamStep.PAUSED
        while progress is not StreamStep.DONE:
            if progress is StreamStep.BLOCKED:
                self._channel.wait_writable(self._stall_s)
            with self._queue.lock:
                if frame.job.stopped:
                    raise _Stopped
                progress = parcel.advance()
                frame.checksum = parcel.checksum
                frame.left = left - parcel.num_moved

    def _pad(self, frame: _Frame) -> None:
        while frame.left:
            with self._queue.lock:  # otherwise the answer may be handled before `left` is updated
                count = self._channel.send([_ZEROS[: frame.left]])
                frame.left -= count
            if not count:
                self._channel.wait_writable(self._stall_s)

    def _read(self) -> None:
        try:
            while True:
                data = receive_exactly(self._channel, tcp_frames.ANSWER_BYTES, within_s=self._stall_s, patient=True)
                if data is None:
                    break
                self._on_answer(*tcp_frames.unpack_answer(data))
            reason = "the receiver has disconnected"
        except (OSError, TransferError) as error:
            reason = f"tcp connection lost: {error}"
        self._broken(reason)

    def _on_answer(self, kind: FrameKind, write_id: int) -> None:
        if not self._unanswered or self._unanswered[0].write_id != write_id:
            raise TransferError("an answer without a write")
        frame = self._unanswered.popleft()
        # The last call may have sent everything while its bytes are still being checksummed.
        with self._queue.lock:
            whole, checksum = not frame.left, frame.checksum
        if not whole:
            raise TransferError("an answer to a frame that is not sent yet")
        if kind is FrameKind.DONE:
            frame.job.succeed(checksum, frame.num_bytes)
        else:
            frame.job.fail("the receiver refused the write")


class _Stopped(Exception):
    """The job must not read its sources any more."""
