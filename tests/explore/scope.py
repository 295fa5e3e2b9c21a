"""How large a world is explored, and the names in it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kv_transfer import actions as act
from kv_transfer.config import TransferSettings
from kv_transfer.ladder import Ladder
from kv_transfer.messages import Body, Envelope, PrefillJob, TransferKey
from tandem.ids import BlockHash, Incarnation, RequestId, TransferId
from tandem.kv_layout import KVLayout
from tandem.sampling import SamplingParams
from tests.explore.freeze import Interned, Machines

LAYOUT = KVLayout(model_fingerprint="m", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=1, block_size=2)
TAIL = BlockHash(b"right tokens....")
TRANSFER = TransferId("t")
"""Each request's own name in its own life; two lives never see each other's messages."""


class _Sampling(SamplingParams):
    """Hashable, as a value in a state must be: every request here samples alike."""

    def __hash__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The bounds of one exploration."""

    num_chunks: int = 3
    """One block each."""
    max_faults: int = 2
    """Shared by all requests."""
    max_attempts: int = 2
    max_rewrites: int = 1
    write_window: int = 2
    shared_memory: bool = True
    """Revocation needs the writer's word and DRAINED is a proof (`shm`); else the reverse (`tcp`)."""
    remote: bool = False
    """With `shared_memory`: DRAINED is no proof either, for bytes may still be in the network (RDMA)."""
    other_tokens: bool = False
    """Whether a prefill worker may compute another prompt than it was asked for."""
    bent: bool = False
    """Whether messages may arrive with other content than was sent: a peer that is broken, or hostile."""
    only: frozenset[str] | None = None
    """Kinds of faults to explore; None means all."""


@dataclass(slots=True, kw_only=True)
class Names:
    """What is numbered, and the caches that all lives share."""

    scope: Scope
    machines: Machines = field(default_factory=Machines)
    envelopes: Interned = field(default_factory=Interned)
    settings: TransferSettings = field(init=False)
    fresh_ladder: int = field(init=False)

    def __post_init__(self) -> None:
        self.settings = TransferSettings(max_rewrites=self.scope.max_rewrites, write_window=self.scope.write_window)
        num_tokens = LAYOUT.block_size * self.scope.num_chunks - 1
        job = PrefillJob(
            transfer_id=TRANSFER,
            request_id=RequestId("r"),
            token_ids=tuple(range(num_tokens)),
            num_prompt_tokens=num_tokens,
            held_tokens=0,
            sampling=_Sampling(),
            hash_root=BlockHash(bytes(16)),
            timeout_s=0.5,
            tail_hash=TAIL,
        )
        self.fresh_ladder = self.machines.add(Ladder(job, layout=LAYOUT, settings=self.settings))

    def prefill(self, at: int, epoch: int) -> Incarnation:
        """Of a prefill worker's process."""
        return Incarnation(100 * (at + 1) + epoch)

    def decode(self, epoch: int) -> Incarnation:
        """Of a decode worker's process."""
        return Incarnation(1000 + epoch)

    def at(self, incarnation: Incarnation) -> int:
        """Which prefill worker that is or was."""
        return incarnation // 100 - 1

    def from_decode(self, epoch: int, key: TransferKey | None, body: Body) -> int:
        """Number of a message from a decode worker."""
        return self.envelopes.number(Envelope(incarnation=self.decode(epoch), key=key, body=body))

    def from_prefill(self, at: int, epoch: int, key: TransferKey | None, body: Body) -> int:
        """Number of a message from a prefill worker."""
        return self.envelopes.number(Envelope(incarnation=self.prefill(at, epoch), key=key, body=body))

    def compiled(self, actions: act.Actions, envelope: Callable[[Body], int]) -> list[tuple[str, Any]]:
        """Actions by name; messages by number."""
        return [
            ("Send", envelope(action.body)) if isinstance(action, act.Send) else (type(action).__name__, action)
            for action in actions
        ]
