"""The layout of a step against a plain version, over random histories of requests."""

import random
from array import array

import numpy as np
import pytest

from engine.runner.step_input_builder import StepInputBuilder, build_step_inputs
from engine.types.block_moves import BlockCopy
from engine.types.request import Batch, BatchItem, BlockTable, Request
from engine.types.step_inputs import StepInputs
from tandem.errors import InvariantError
from tandem.values.ids import BlockHash, BlockId, RequestId
from tandem.values.sampling import SamplingParams

SIZE = 4


def request(rng: random.Random, num_tokens: int) -> Request:
    return Request(
        request_id=RequestId("r"),
        token_ids=array("i", [rng.randrange(1000) for _ in range(num_tokens)]),
        num_prompt_tokens=num_tokens,
        params=SamplingParams(),
        hash_root=BlockHash(b""),
        block_table=BlockTable(BlockId(rng.randrange(1, 500)) for _ in range(-(-num_tokens // SIZE))),
    )


def assert_plain(inputs: StepInputs, batch: Batch) -> None:
    """Every array, recomputed token by token."""
    order = sorted(range(len(batch.items)), key=lambda i: (batch.items[i].num_tokens > 1, -batch.items[i].start))
    tokens, positions, slots, last = [], [], [], {}
    for row, i in enumerate(order):
        item = batch.items[i]
        table = item.request.block_table
        end = item.start + item.num_tokens
        for position in range(item.start, end):
            tokens.append(item.request.token_ids[position])
            positions.append(position)
            slots.append(table[position // SIZE] * SIZE + position % SIZE)
        last[i] = len(tokens) - 1
        needed = -(-end // SIZE)
        assert inputs.tables[row].tolist() == [*table.ids[:needed], *[0] * (inputs.tables.shape[1] - needed)]
        assert (inputs.starts[row], inputs.counts[row]) == (item.start, item.num_tokens)
    assert inputs.token_ids.tolist() == tokens
    assert inputs.positions.tolist() == positions
    assert inputs.slots.tolist() == slots
    assert inputs.sample_rows.tolist() == [last[i] for i, item in enumerate(batch.items) if item.samples]
    assert inputs.num_single == sum(item.num_tokens == 1 for item in batch.items)
    assert inputs.tables.shape[1] == max(-(-(item.start + item.num_tokens) // SIZE) for item in batch.items)
    assert inputs.copies.tolist() == [list(copy) for copy in batch.copies]
    for name in ("token_ids", "positions", "slots", "tables", "starts", "counts", "sample_rows", "copies"):
        assert getattr(inputs, name).dtype == np.int64


def edit(rng: random.Random, live: list[Request]) -> None:
    """A scheduler's changes of its requests between two steps."""
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        live.append(request(rng, rng.randrange(1, 40)))
    for victim in rng.sample(live, min(len(live) - 1, rng.choice([0, 0, 0, 1]))):
        live.remove(victim)
    for one in live:
        if rng.random() < 0.05 and len(one.block_table):
            one.block_table.replace(rng.randrange(len(one.block_table)), BlockId(rng.randrange(1, 500)))
        if rng.random() < 0.05:  # preempted, and admitted again with other blocks
            count = len(one.block_table.clear())
            one.block_table.extend(BlockId(rng.randrange(1, 500)) for _ in range(count))
            one.num_computed_tokens = 0


def step(rng: random.Random, live: list[Request]) -> Batch:
    """Some of them, in some order; most have one token to compute."""
    items = []
    for one in rng.sample(live, len(live) if rng.random() < 0.7 else rng.randint(1, len(live))):
        gap = one.num_tokens - one.num_computed_tokens
        count = gap if rng.random() < 0.8 else rng.randint(1, gap)
        items.append(BatchItem(one, one.num_computed_tokens, count, count == gap))
    copies = (BlockCopy(BlockId(3), BlockId(9)),) if rng.random() < 0.2 else ()
    return Batch(items=tuple(items), copies=copies)


@pytest.mark.parametrize("seed", range(6))
def test_step_inputs_incremental_builder_equals_fresh_one(seed: int) -> None:
    rng, builder = random.Random(seed), StepInputBuilder(SIZE)
    live = [request(rng, rng.randrange(1, 40)) for _ in range(5)]
    for _ in range(120):
        batch = step(rng, live)
        assert_plain(builder.build(batch), batch)
        assert_plain(build_step_inputs(batch, SIZE), batch)
        for item in batch.items:
            item.request.num_computed_tokens = item.start + item.num_tokens
            if item.samples:
                item.request.token_ids.append(rng.randrange(1000))
                if len(item.request.block_table) * SIZE < item.request.num_tokens:
                    item.request.block_table.append(BlockId(rng.randrange(1, 500)))
        edit(rng, live)


@pytest.mark.parametrize(("start", "count"), [(5, 2), (0, 0), (6, 1)])
def test_step_inputs_beyond_request_is_refused(start: int, count: int) -> None:
    one = request(random.Random(0), 6)
    with pytest.raises(InvariantError, match=r"step over tokens|has not been sampled"):
        build_step_inputs(Batch(items=(BatchItem(one, start, count, False),)), SIZE)


def test_step_inputs_missing_blocks_are_refused() -> None:
    one = request(random.Random(0), 6)
    one.block_table.clear()
    with pytest.raises(InvariantError, match="0 blocks"):
        build_step_inputs(Batch(items=(BatchItem(one, 5, 1, True),)), SIZE)
