"""Decoding steps on a CPU as programs: recorded when a number of rows is first met, then repeated.

Between the kernels of a layer an eager step spends some 10 us in Python each time, during which memory, the limit of
decoding, is idle. A program makes all calls from the first norm to the logits without returning to Python.
"""

import ctypes
from dataclasses import dataclass

from torch import Tensor

from engine.backends.buffers import Buffers
from engine.backends.cpu.attention import CpuAttentionPlan
from engine.kernels.cpu.library import KernelLibrary
from engine.kernels.cpu.program import KernelProgram
from engine.model.backend import RecordableModel
from engine.model.layers.attention import AttentionBackend, AttentionPlan
from engine.model.layers.grouped_attention import GroupedPlan
from engine.types.step_inputs import StepInputs
from tandem.errors import InvariantError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Recorded:
    """A program and the memory that it reads and writes."""

    program: KernelProgram
    embedded_at: int  # where it expects [num_rows, hidden_size]
    logits: Tensor  # float32 [num_rows, vocab_size]
    records: tuple[ctypes.Structure, ...]  # kernel arguments of a step; rewritten for each step


class CpuPrograms:
    """Implements StepGraphs for steps in which every sequence computes one row and samples."""

    def __init__(self, model: RecordableModel, attention: AttentionBackend, library: KernelLibrary, buffers: Buffers, *,
                 max_rows: int) -> None:  # fmt: skip
        """`attention`: CpuAttention, or one for each group of layers.

        `max_rows`: largest step to record; larger ones are computed eagerly.
        """
        self._model = model
        self._attention = attention
        self._library = library
        self._buffers = buffers
        self._max_rows = max_rows
        self._generation = buffers.generation
        self._programs: dict[tuple[int | bool, ...], _Recorded] = {}

    def logits(self, inputs: StepInputs, token_ids: Tensor, rows: Tensor | None) -> Tensor | None:
        num_rows = len(inputs.token_ids)
        if rows is not None or inputs.num_single != num_rows or num_rows > self._max_rows:
            return None
        plan = self._attention.plan(inputs)
        if self._generation != self._buffers.generation:
            # A larger step has moved the buffers: recorded programs point to their former memory.
            self._programs.clear()
            self._generation = self._buffers.generation
        embedded = self._model.embedding(token_ids)
        plans = _plans(plan)
        key = (num_rows, *(used for part in plans for used in part.kernels))
        recorded = self._programs.get(key)
        if recorded is None or recorded.embedded_at != embedded.data_ptr():
            return self._record(key, embedded, plan)
        for target, source in zip(recorded.records, _records(plans), strict=True):
            ctypes.memmove(ctypes.addressof(target), ctypes.addressof(source), ctypes.sizeof(target))
        self.replay(recorded.program)
        return recorded.logits

    def replay(self, program: KernelProgram) -> None:
        """Run the model's part of a step; a method of its own so that a benchmark can time it."""
        program.run()

    def _record(self, key: tuple[int | bool, ...], embedded: Tensor, plan: AttentionPlan) -> Tensor:
        with self._library.recording() as calls:
            logits = self._model.logits_of_embedded(embedded, plan)
        if self._generation != self._buffers.generation:
            return logits  # this step moved a buffer: record the next of its kind
        given = _records(_plans(plan))
        records = tuple(type(record)() for record in given)
        moved = {
            ctypes.addressof(source): ctypes.addressof(target) for source, target in zip(given, records, strict=True)
        }
        self._programs[key] = _Recorded(
            program=KernelProgram(self._library, calls, moved),
            embedded_at=embedded.data_ptr(),
            logits=logits,
            records=records,
        )
        return logits


def _plans(plan: AttentionPlan) -> list[CpuAttentionPlan]:
    """A step's plans by group of layers. Raises InvariantError for those of another backend."""
    parts = plan.plans if isinstance(plan, GroupedPlan) else (plan,)
    found = [part for part in parts if isinstance(part, CpuAttentionPlan)]
    if len(found) != len(parts):
        raise InvariantError("a program of another backend's attention")
    return found


def _records(plans: list[CpuAttentionPlan]) -> list[ctypes.Structure]:
    return [record for plan in plans for record in plan.records]
