"""The layout of a step against a plain version, over random histories of requests."""

import random
from array import array
from dataclasses import replace

import numpy as np
import pytest

from engine.runner.step_input_builder import StepInputBuilder, build_step_inputs
from engine.types.block_moves import BlockCopy
from engine.types.block_table import BlockTable
from engine.types.request import Batch, BatchItem, Request
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


def twins(batch: Batch) -> Batch:
    """The same work without drafts: for each draft another request with the same blocks, which knows it already."""
    items = []
    for item in batch.items:
        items.append(item._replace(drafts=()))
        for i in range(1, len(item.drafts) + 1):
            one = item.request
            tokens = array("i", [*one.token_ids, *item.drafts[:i]])
            twin = replace(one, token_ids=tokens, block_table=BlockTable(one.block_table))
            items.append(BatchItem(twin, item.start + i, 1, True))
    return replace(batch, items=tuple(items))


def sequences(inputs: StepInputs) -> list[tuple[list[int], ...]]:
    """What each sequence of one row computes."""
    columns = (inputs.token_ids, inputs.positions, inputs.slots, inputs.starts, inputs.counts)
    return [(*(column[i].tolist() for column in columns), inputs.tables[i].tolist()) for i in range(inputs.num_single)]


@pytest.mark.parametrize("seed", range(6))
def test_step_inputs_drafts_are_rows_of_requests_that_know_them(seed: int) -> None:
    rng, builder, num_drafts = random.Random(seed), StepInputBuilder(SIZE), 0
    live = [request(rng, rng.randrange(1, 40)) for _ in range(5)]
    for _ in range(60):
        items = []
        for item in step(rng, live).items:
            most = len(item.request.block_table) * SIZE - item.request.num_tokens
            can = item.samples and item.num_tokens == 1 and most > 0 and rng.random() < 0.7
            drafts = [rng.randrange(1000) for _ in range(rng.randint(1, most))] if can else []
            items.append(item._replace(drafts=tuple(drafts)))
            num_drafts += can
        batch = Batch(items=tuple(items))
        found, plain = builder.build(batch), build_step_inputs(twins(batch), SIZE)
        assert found.num_single == plain.num_single == len(sequences(found))
        assert sorted(sequences(found)) == sorted(sequences(plain))
        for name in ("token_ids", "positions", "slots", "starts", "counts", "tables"):
            ours, theirs = (getattr(inputs, name)[inputs.num_single :].tolist() for inputs in (found, plain))
            assert ours == theirs
        # The same samples in the same order; those of a request in the order of its tokens.
        for name in ("token_ids", "positions", "slots"):
            ours, theirs = (getattr(inputs, name)[inputs.sample_rows].tolist() for inputs in (found, plain))
            assert ours == theirs
        place = 0
        for item in batch.items:
            rows = found.sample_rows[place : place + 1 + len(item.drafts)].tolist() if item.samples else []
            assert rows == list(range(rows[0], rows[0] + len(rows))) if rows else not item.drafts
            place += len(rows)
        for item in batch.items:
            item.request.num_computed_tokens = item.start + item.num_tokens
            if item.samples:
                item.request.token_ids.append(rng.randrange(1000))
                if len(item.request.block_table) * SIZE < item.request.num_tokens + rng.choice([0, 0, 9]):
                    item.request.block_table.extend(BlockId(rng.randrange(1, 500)) for _ in range(3))
        edit(rng, live)
    assert num_drafts > 20


def test_step_inputs_tokens_after_drafts_are_not_fed() -> None:
    """How many drafts will be kept is not known, so nothing may be computed behind them."""
    rng = random.Random(1)
    one, other = request(rng, 6), request(rng, 6)
    builder = StepInputBuilder(SIZE)
    builder.build(Batch(items=(BatchItem(one, 5, 1, True, (7, 8)), BatchItem(other, 5, 1, True))))
    inputs = builder.build(Batch(items=(BatchItem(other, 6, 1, True),)))
    assert inputs.feeds.tolist() == [[0, 3]]
    builder.build(Batch(items=(BatchItem(one, 5, 1, True, (7, 8)),)))
    with pytest.raises(InvariantError, match="has not been sampled"):
        builder.build(Batch(items=(BatchItem(one, 6, 1, True),)))
