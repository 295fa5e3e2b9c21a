"""The prefill worker's engine as its senders see it: what it has computed after how many of its steps."""

from typing import NamedTuple

from kv_transfer.protocol.actions import StartWrite
from tandem.values.ids import BlockId
from tests.proofs.explore.model.life import OTHER, SenderSlot
from tests.proofs.explore.model.properties import Violation
from tests.proofs.explore.model.scope import UNIT_TOKENS, WINDOW_BLOCKS, Scope

STOPPED = 99
"""Step of an engine that has nothing left to do."""
_OTHER_TABLE = 100
"""Source blocks of a prompt that was preempted and begun again."""


class Op(NamedTuple):
    """What the engine does next."""

    kind: str
    """SCHEDULE leaves the queue; LAYER and COMPUTED tell how far it is; FINISH samples."""
    ready: int
    """Units computed in all layers after it."""
    coming: int
    """Units of the step under way, included."""
    layers: int
    """Of those, layers that are done."""


SCHEDULE, LAYER, COMPUTED, FINISH = "schedule", "layer", "computed", "finish"


class Engine:
    """Pure: the program of a prompt, and what a cell holds while it runs."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._order, self._groups = scope.layout.layer_order, scope.layout.groups
        self._programs: dict[int, tuple[Op, ...]] = {}

    def program(self, held_units: int) -> tuple[Op, ...]:
        """All that it does for a prompt of which so much is held; a step that would compute only that is left out."""
        program = self._programs.get(held_units)
        if program is None:
            program = self._programs[held_units] = self._make(held_units)
        return program

    def _make(self, held_units: int) -> tuple[Op, ...]:
        if self._scope.fetch:
            return (Op(COMPUTED, self._scope.num_units, self._scope.num_units, 0),)
        ops = [Op(SCHEDULE, held_units, held_units, 0)]
        end = 0
        for size in self._scope.steps:
            end += size
            if end > held_units:
                ready = max(held_units, end - size)
                ops += [Op(LAYER, ready, end, layer) for layer in range(1, self._scope.num_layers)]
                ops.append(Op(COMPUTED, end, end, 0))
        return (*ops, Op(FINISH, end, end, 0))

    def tokens(self, units: int) -> int:
        """Tokens in so many leading units."""
        return min(units * UNIT_TOKENS, self._scope.num_units * UNIT_TOKENS - 1)

    def table(self, thrown_out: int) -> tuple[int, ...]:
        """Source blocks of the whole prompt."""
        first = 0 if thrown_out < 0 else _OTHER_TABLE
        return tuple(range(first, first - (-self._scope.num_units // self._scope.units_per_source)))

    def windows(self, table: tuple[int, ...]) -> tuple[tuple[BlockId, ...], ...]:
        """Source blocks of the windowed layers, beside those of the whole prompt."""
        return self._scope.windows(table, 0)

    def read(self, sender: SenderSlot, held_units: int, order: StartWrite) -> tuple[int, ...]:
        """Content of the cells that a write reads, from the source blocks that it names."""
        cells, contents = order.cells, []
        for unit in range(held_units + cells.first_unit, held_units + cells.first_unit + cells.num_units):
            source = order.sources[unit // self._scope.units_per_source - order.first_block]
            for layer in range(cells.first_layer, cells.first_layer + cells.num_layers):
                if not self._holds(sender, held_units, source, unit, layer):
                    raise Violation(f"reads layer {layer} of unit {unit} before it is computed")
                place = (unit * self._scope.num_layers + layer) * self._scope.num_heads
                heads = range(cells.first_head, cells.first_head + cells.num_heads)
                contents += [place + head + (OTHER if sender.other else 0) for head in heads]
        return tuple(contents)

    def _holds(self, sender: SenderSlot, held_units: int, source: int, unit: int, layer: int) -> bool:
        """`layer`: by the layout's order of layers."""
        group, source = divmod(source, WINDOW_BLOCKS)
        model_layer = self._order[layer]
        if model_layer not in self._groups[group] or source % _OTHER_TABLE != unit // self._scope.units_per_source:
            return False
        old = sender.thrown_out >= 0 and source < _OTHER_TABLE
        made = min(sender.thrown_out if old else sender.step, len(self.program(held_units)))
        op = self.program(held_units)[made - 1]
        return made > 0 and (unit < op.ready or (unit < op.coming and model_layer < op.layers))
