"""What the tests of both state machines share."""

from dataclasses import replace

from kv_transfer.protocol import actions as act
from kv_transfer.protocol.messages import (
    Body,
    FirstToken,
    HandoffEnvelope,
    PrefillJob,
    TransferKey,
)
from kv_transfer.protocol.receiver import Receiver
from kv_transfer.protocol.sender import Sender
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.protocol.states import HandoffState
from tandem.values.ids import BlockHash, BlockId, Incarnation, RequestId, TransferId
from tandem.values.kv_layout import KVLayout
from tandem.values.outputs import SampledToken
from tandem.values.sampling import SamplingParams

LAYOUT = KVLayout(model_fingerprint="m", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=4, block_size=4)
KEY = TransferKey(transfer_id=TransferId("t"), attempt=1)
PEER = Incarnation(7)
OWN = Incarnation(70)
BLOCKS = tuple(BlockId(b) for b in (5, 3, 9))
TOKEN = FirstToken(token=SampledToken(token_id=1), cached_tokens=0)
SETTINGS = TransferSettings(max_rewrites=1)
JOB = PrefillJob(
    transfer_id=KEY.transfer_id,
    request_id=RequestId("r"),
    token_ids=tuple(range(10)),
    num_prompt_tokens=10,
    held_tokens=0,
    sampling=SamplingParams(),
    hash_root=BlockHash(bytes(16)),
)


FETCH = replace(
    JOB,
    token_ids=(),
    num_prompt_tokens=0,
    fetch=True,
    resume=True,
    names=tuple(BlockHash(bytes([i]) * 16) for i in range(3)),
)
"""48 tokens, twelve blocks of the layout."""


class Half:
    """A machine with its time and its peer's name filled in."""

    def __init__(self, machine: Receiver | Sender) -> None:
        self.machine = machine
        self.now = 0.0

    def hear(
        self, body: Body, *, key: TransferKey = KEY, peer: Incarnation = PEER, to: Incarnation = OWN
    ) -> act.Actions:
        envelope = HandoffEnvelope(incarnation=peer, addressee=to, key=key, body=body)
        return self.machine.on_message(envelope, self.now)

    def see(self, event: object) -> act.Actions:
        return self.machine.on_event(event, self.now)

    @property
    def state(self) -> HandoffState:
        return self.machine.state


def kinds(actions: act.Actions) -> list[str]:
    return [type(a.body if isinstance(a, act.SendMessage) else a).__name__ for a in actions]
