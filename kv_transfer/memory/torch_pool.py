"""A DevicePool over a torch tensor on any device. Imports torch lazily.

Work on the pool has streams of its own and does not wait for the engine's stream, which runs a step ahead, because its
steps touch none of the blocks in question. No block is read before it is written, or written while it is read, because
the following holds before any call here:

- A *source* is reported once the step that wrote it has settled, that is, the engine's thread has waited for the step's
  own event (`engine.runner.pending_samples`), so everything up to that step is in the pool. A block that a step loads
  from host memory has its name sooner, but is reported with that step, too (`Scheduler.is_arriving`); one loaded
  between steps is there when the call returns (`BlockMover.move_now` waits); one that a hand-off has brought is
  reported after its `verify`, which ends after the copies below. No later step writes a reported block: steps write
  positions beyond those computed, and a prompt's last block is sent after its last step. Layers of a running step are
  reported only where the host itself computes them.
- A *destination* is a free block, and a block becomes free when the newest step that may touch it has settled
  (`engine.lookahead.StepHolds`). While a step still saves a block that is free already, it becomes no destination until
  that step has settled (`Batch.saves_free_blocks`); blocks that `bind` evicts have been saved when it returns.
- *Landed* blocks are read by steps launched after `verify`. Every call here returns when the device is done with it,
  and a peer that writes by itself (`cuda_ipc`) reports a write when its own stream is done.

`tests/unit/engine/scheduler/test_lookahead_machine.py` checks the first two on the scheduler, with steps that run late.

Tensors made here are used and freed within one such stream, so the allocator needs no events either.

On a GPU one kernel copies and sums the runs of a chunk, whatever they are (`run_kernel`). Plain torch does the same
where triton is missing, for runs that are no multiples of four bytes, from one GPU to another, and in the memory of the
host, where it is what the kernel is compared with: the runs of a layer are the same in every layer, so each is one
strided copy over all layers, into or from a payload that is contiguous. Host memory is copied as a whole.

`sum32` is the checksum of payload that never leaves devices: its little-endian 32-bit words, the last one padded with
zeros, each multiplied by an odd number that depends on its position, added modulo 2**32. It detects any change of a
single word, and any other with a probability of 1 - 2**-32; a CRC would have to be computed byte by byte.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from kv_transfer.layout.runs import RunPairs, Runs
from kv_transfer.memory.checksum import SUM32_MASK, SUM32_STEP, SUM32_WORD_BYTES
from kv_transfer.memory.device_pool import Bytes
from kv_transfer.memory.move_table import ALIGNMENTS, MoveTable
from kv_transfer.memory.numpy_copy import rows_of
from kv_transfer.memory.side_streams import SideStreams, StreamLane
from tandem.errors import TransferError
from tandem.values.kv_layout import KVLayout

_NO_MEMORY = "the device has no memory left besides the pool"


class TorchPool:
    """DevicePool over `memory`, a contiguous uint8 tensor that begins with the pool's first plane."""

    def __init__(self, memory: Any, layout: KVLayout, *, streams: SideStreams | None = None) -> None:
        """`streams`: the streams to work on; by default new ones of the tensor's device, if it has any."""
        self._torch = importlib.import_module("torch")
        self._memory = memory.view(-1)
        num_blocks, rest = divmod(self._memory.numel(), layout.region_block_bytes)
        if rest or not num_blocks or self._memory.dtype is not self._torch.uint8:
            raise ValueError(f"{self._memory.numel()} bytes are not a pool of {layout.region_block_bytes}-byte blocks")
        self.num_blocks: int = num_blocks
        self.layout = layout
        self._planes = self._memory.view(layout.num_planes // layout.num_regions, -1)
        self._on_cuda = self._memory.device.type == "cuda"
        if streams is None and self._on_cuda:
            streams = SideStreams(self._torch.cuda, self._memory.device)
        self._streams = streams
        self._kernel: Any = None
        """A RunKernel, or None where plain torch does its work."""
        if self._on_cuda:
            self._kernel = _kernel_on(self._memory.device)

    @property
    def memory(self) -> Any:
        """The whole pool, a uint8 tensor."""
        return self._memory

    @property
    def identity(self) -> str:
        device = self._memory.device
        if not self._on_cuda:
            return str(device.type)
        return f"{device.type} {self._torch.cuda.get_device_properties(device).uuid}"

    @property
    def address(self) -> int:
        return int(self._memory.data_ptr())

    @property
    def cuda_index(self) -> int | None:
        return int(self._memory.get_device()) if self._on_cuda else None

    def allocate(self, num_bytes: int) -> Bytes:
        tensor = self._torch.empty(num_bytes, dtype=self._torch.uint8, pin_memory=self._on_cuda)
        payload: Bytes = tensor.numpy()
        return payload

    def gather(self, runs: Runs, payload: Bytes) -> None:
        _check_size(runs, payload.nbytes)
        with self.working() as stream:
            packed = self._blank(runs.num_bytes)
            total = self._start(runs, self._memory, None, packed, stream)
            if total is None:
                self.pack(runs, packed)
            self._torch.from_numpy(payload).copy_(packed, non_blocking=True)
        if total is not None:
            total()

    def scatter(self, runs: Runs, payload: Bytes) -> None:
        _check_size(runs, payload.nbytes)
        with self.working() as stream:
            packed = self._torch.from_numpy(payload).to(self._memory.device, non_blocking=True)
            total = self._start(None, packed, runs, self._memory, stream)
            if total is None:
                self.unpack(runs, packed)
        if total is not None:
            total()

    def copy(self, copies: RunPairs) -> None:
        if not copies.planes or self._finished(MoveTable.of_copies(copies), self._memory, self._memory) is not None:
            return
        with self.working():
            for source, target, index in copies.planes:
                for begin, end, length in copies.plane_pairs[index]:
                    run = self._planes[source, begin : begin + length]
                    self._planes[target, end : end + length].copy_(run)

    def send(self, reads: Runs, target: "TorchPool", writes: Runs) -> int:
        """See DevicePool; all of it runs on one of this pool's streams."""
        _check_size(writes, reads.num_bytes)
        total = self._moved(reads, self._memory, writes, target.memory)
        if total is not None:
            return total
        with self.working():
            packed = self.pack(reads)
            number = self.sum_of(packed)
            target.unpack(writes, packed)
            return self._number(number)

    def lane_to(self, target: "TorchPool") -> StreamLane:
        return StreamLane(
            None if self._kernel is None else self._streams,
            start=lambda reads, writes, stream: self._start(reads, self._memory, writes, target.memory, stream),
            send=lambda reads, writes: self.send(reads, target, writes),
        )

    def blank(self, num_bytes: int) -> Any:
        with self._on_stream(waits=False):
            return self._blank(num_bytes)

    def pack_summed(self, runs: Runs) -> tuple[Any, int]:
        with self.working() as stream:
            packed = self._blank(runs.num_bytes)
            total = self._start(runs, self._memory, None, packed, stream)
            if total is None:
                return packed, self._number(self.sum_of(self.pack(runs, packed)))
        return packed, total()

    def unpack_summed(self, runs: Runs, packed: Any) -> int:
        total = self._moved(None, packed, runs, self._memory)
        if total is not None:
            return total
        with self.working():
            number = self.sum_of(packed)
            self.unpack(runs, packed)
            return self._number(number)

    def checksum(self, runs: Runs) -> int:
        total = self._moved(runs, self._memory, None, None)
        if total is not None:
            return total
        with self.working():
            return self._number(self.sum_of(self.pack(runs)))

    def _moved(self, reads: Runs | None, source: Any, writes: Runs | None, target: Any) -> int | None:
        """Like `_start`, on a stream of this pool, and wait for it; returns the sum."""
        if self._kernel is None:
            return None
        if reads is None and writes is not None:
            _check_size(writes, source.numel())
        return self._finished(MoveTable.between(reads, writes), source, target)

    def _finished(self, moves: MoveTable | None, source: Any, target: Any) -> int | None:
        if self._kernel is None:
            return None
        stream = None if self._streams is None else self._streams.acquire()
        try:
            total = self._launch(moves, source, target, stream)
            if stream is not None:
                stream.synchronize()
            return None if total is None else total()
        finally:
            if self._streams is not None:
                self._streams.release(stream)

    def _start(
        self, reads: Runs | None, source: Any, writes: Runs | None, target: Any, stream: Any
    ) -> Callable[[], int] | None:
        """Have the kernel copy and sum on a stream; None when it cannot. What is returned is called once it is done,
        and returns the sum.

        Without `reads` or `writes`, bytes are in the order of the wire there; without `target`, they are only summed.
        Raises TransferError when the device has no memory left.
        """
        return None if self._kernel is None else self._launch(MoveTable.between(reads, writes), source, target, stream)

    def _launch(self, moves: MoveTable | None, source: Any, target: Any, stream: Any) -> Callable[[], int] | None:
        if moves is None or self._kernel is None:
            return None
        for end in (source, target):
            if end is not None and (end.data_ptr() % ALIGNMENTS[0] or end.device != self._memory.device):
                return None
        try:
            launched: Callable[[], int] = self._kernel.launch(moves, source, target, stream)
        except self._torch.OutOfMemoryError:
            raise TransferError(_NO_MEMORY) from None
        return launched

    def _blank(self, num_bytes: int) -> Any:
        return self._torch.empty(num_bytes, dtype=self._torch.uint8, device=self._memory.device)

    def pack(self, runs: Runs, packed: Any = None) -> Any:
        """Copy the bytes that `runs` name into `packed`, by default a new uint8 tensor on the device, and return it.

        Within `working`.
        """
        if packed is None:
            packed = self._blank(runs.num_bytes)
        layers = packed.view(runs.num_layers, -1)
        for (planes, columns), part in rows_of(runs):
            layers[:, part].copy_(self._planes[planes, columns])
        return packed

    def unpack(self, runs: Runs, packed: Any) -> None:
        """Copy `packed` into the bytes that `runs` name. Within `working`. Raises TransferError when sizes disagree."""
        _check_size(runs, packed.numel())
        layers = packed.view(runs.num_layers, -1)
        for (planes, columns), part in rows_of(runs):
            self._planes[planes, columns] = layers[:, part]

    def sum_of(self, packed: Any) -> Any:
        """`sum32` of a uint8 tensor, as an int64 tensor whose low 32 bits count. Within `working`."""
        torch = self._torch
        padding = -packed.numel() % SUM32_WORD_BYTES
        if padding:
            packed = torch.nn.functional.pad(packed, (0, padding))
        words = packed.view(torch.int32)
        weights = torch.arange(words.numel(), dtype=torch.int32, device=words.device) * (SUM32_STEP - (1 << 32)) + 1
        # 32-bit products wrap; their 64-bit sum cannot.
        return (words * weights).sum(dtype=torch.int64)

    @staticmethod
    def _number(total: Any) -> int:
        """The value of a `sum_of` tensor. Within `working`, so that no other stream is waited for."""
        return int(total.item()) & SUM32_MASK

    def working(self) -> AbstractContextManager[Any]:
        """Context of work on the device that waits for no other work, and is done at exit. Threads may run it
        concurrently. Yields the stream, which is the current one, or None where there are no streams.

        Raises TransferError when the device has no memory left.
        """
        return self._on_stream(waits=True)

    @contextmanager
    def _on_stream(self, *, waits: bool) -> Iterator[Any]:
        """Like `working`; `waits`: for the stream, at exit."""
        try:
            if self._streams is None:
                yield None
                return
            stream = self._streams.acquire()
            try:
                with self._streams.current(stream):
                    yield stream
            finally:
                # Even after an error: memory that is still being read must not be freed.
                if waits:
                    stream.synchronize()
                self._streams.release(stream)
        except self._torch.OutOfMemoryError:
            raise TransferError(_NO_MEMORY) from None


def _check_size(runs: Runs, num_bytes: int) -> None:
    if num_bytes != runs.num_bytes:
        raise TransferError(f"payload of {num_bytes} bytes for cells of {runs.num_bytes}")


@functools.cache
def _kernel_on(device: Any) -> Any:
    """The RunKernel of a GPU, for all pools on it; None without triton. Loads the kernel, on the current stream."""
    try:
        run_kernel = importlib.import_module("kv_transfer.memory.run_kernel")
    except ImportError:
        return None
    return run_kernel.RunKernel(device)
