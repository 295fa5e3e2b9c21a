"""Steps survive the wire for any batch; other bytes are refused."""

import random
from array import array
from dataclasses import fields, replace

import numpy as np
import pytest

from engine.distributed.wire.steps import decode_step, encode_step
from engine.runner.step_input_builder import build_step_inputs
from engine.types.block_moves import BlockCopy, BlockLoad, BlockOffload
from engine.types.block_table import BlockTable
from engine.types.prompt_logprobs import PromptScoringState
from engine.types.request import Batch, BatchItem, Request
from engine.types.step_inputs import StepInputs
from tandem.errors import InvariantError
from tandem.values.ids import BlockHash, BlockId, RequestId
from tandem.values.sampling import SamplingParams


def step(rng: random.Random) -> StepInputs:
    items = []
    for i in range(rng.randint(1, 9)):
        start, count = rng.randrange(40), rng.choice([1, 1, 1, rng.randint(2, 30)])
        num_blocks = -(-(start + count) // 4)
        request = Request(
            request_id=RequestId(str(i)),
            token_ids=array("i", [rng.randrange(2**31) for _ in range(start + count)]),
            num_prompt_tokens=start + count,
            params=SamplingParams(),
            hash_root=BlockHash(b""),
            block_table=BlockTable([BlockId(rng.randrange(2**24)) for _ in range(num_blocks)]),
        )
        if rng.random() < 0.3:
            request.scoring = PromptScoringState(num_prompt_tokens=start + count, num_top=rng.choice([None, 0, 7]))
        items.append(BatchItem(request=request, start=start, num_tokens=count, samples=rng.random() < 0.5))
    offloads = tuple(BlockOffload(BlockId(rng.randrange(99)), rng.randrange(99)) for _ in range(rng.randrange(3)))
    loads = tuple(BlockLoad(rng.randrange(99), BlockId(rng.randrange(99))) for _ in range(rng.randrange(3)))
    copies = tuple(BlockCopy(BlockId(rng.randrange(99)), BlockId(rng.randrange(99))) for _ in range(rng.randrange(3)))
    return build_step_inputs(Batch(items=tuple(items), offloads=offloads, loads=loads, copies=copies), 4)


def test_step_message_every_field_round_trips() -> None:
    rng = random.Random(4)
    for _ in range(200):
        sent = step(rng)
        got = decode_step(memoryview(encode_step(sent)))
        for field in fields(StepInputs):
            mine, theirs = getattr(sent, field.name), getattr(got, field.name)
            if isinstance(mine, np.ndarray):
                assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), field.name
                assert (mine == theirs).all(), field.name
            else:
                assert mine == theirs, field.name


def test_step_message_decoded_outlives_its_bytes() -> None:
    sent = step(random.Random(5))
    data = bytearray(encode_step(sent))
    got = decode_step(data)
    data[36:] = bytes(len(data) - 36)
    assert (got.token_ids == sent.token_ids).all()


@pytest.mark.parametrize("cut", [0, 5, 35, 36, -4, -1])
def test_step_message_truncated_is_refused(cut: int) -> None:
    with pytest.raises(InvariantError):
        decode_step(encode_step(step(random.Random(6)))[:cut])


def test_step_message_negative_size_is_refused() -> None:
    inputs = step(random.Random(7))
    data = bytearray(encode_step(replace(inputs, sample_rows=inputs.sample_rows[:0])))
    data[12:16] = b"\xff\xff\xff\xff"
    with pytest.raises(InvariantError):
        decode_step(data)
