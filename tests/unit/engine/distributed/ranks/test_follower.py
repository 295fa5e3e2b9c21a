"""A rank that runs dry steps releases their memory before its pool is allocated."""

from array import array

import torch

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.distributed.links.channel import ChannelKind
from engine.distributed.ranks.follower import _Follower
from engine.distributed.ranks.messages import PoolPlan
from engine.distributed.wire.steps import encode_step
from engine.model.loader import load_model
from engine.model.memory_budget import kv_layout
from engine.runner.step_input_builder import build_step_inputs
from engine.types.block_table import BlockTable
from engine.types.request import Batch, BatchItem, Request
from tandem.values.ids import BlockHash, BlockId, RequestId
from tandem.values.sampling import SamplingParams
from tests.support.engine.paged_harness import reference_model, save_and_load


class Script:
    """A channel with all of rank 0's messages already sent."""

    def __init__(self, *messages):
        self.messages = [(kind, memoryview(payload), None) for kind, payload in messages]
        self.answers = []

    def receive(self):
        return self.messages.pop(0) if self.messages else None

    def send(self, kind, payload=b""):
        self.answers.append(kind)


def step(block_size):
    request = Request(
        request_id=RequestId("dry"),
        token_ids=array("i", [1, 2, 3]),
        num_prompt_tokens=3,
        params=SamplingParams(),
        hash_root=BlockHash(b""),
        block_table=BlockTable([BlockId(0)]),
    )
    item = BatchItem(request=request, start=0, num_tokens=3, samples=True)
    return encode_step(build_step_inputs(Batch(items=(item,)), block_size))


def test_follower_dry_run_releases_memory(tmp_path, monkeypatch):
    save_and_load(reference_model("Qwen3ForCausalLM"), tmp_path)
    backend = select_backend(BackendOptions(device=torch.device("cpu"), dtype="float32"))
    model = load_model(tmp_path, backend=backend)
    layout = kv_layout(model.config, fingerprint=model.fingerprint, dtype="float32", block_size=16)
    events = []
    channel = Script(
        (ChannelKind.DRY_RUN, PoolPlan(layout=layout, num_blocks=1).to_json()),
        (ChannelKind.STEP, step(16)),
        (ChannelKind.MEASURE, b""),
    )
    follower = _Follower(channel, model)
    trim, growth_bytes = backend.trim, follower._peak.growth_bytes
    monkeypatch.setattr(backend, "trim", lambda: events.append("trimmed") or trim())
    monkeypatch.setattr(follower._peak, "growth_bytes", lambda: events.append("measured") or growth_bytes())
    follower.run()
    assert channel.answers == [ChannelKind.MEASURED]
    assert events == ["measured", "trimmed"]
    assert follower._runner is None
