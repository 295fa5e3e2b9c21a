"""Actions that the two state machines of a hand-off, `Sender` and `Receiver`, request from the code that runs them."""

from dataclasses import dataclass

from kv_transfer.layout.cell_range import CellRange
from kv_transfer.protocol.messages import Body, Chunk, Failure, FirstToken, PrefillJob
from tandem.values.ids import BlockId
from tandem.values.outputs import PhaseTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessage:
    """Send this message to the peer, in order; dropped when the link is down."""

    body: Body


@dataclass(frozen=True, slots=True, kw_only=True)
class BindBlocks:
    """Receiver: find destinations; answer with Bound or BindRefused."""

    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenGrant:
    """Receiver: let the peer write into these destinations; answer with GrantOpened for each lane."""

    blocks: tuple[BlockId, ...]
    windows: tuple[tuple[BlockId, ...], ...] = ()
    """See BlocksBound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Receiver: compare the landed bytes with the checksum; answer with Verified."""

    chunk: Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFirstToken:
    """Receiver: forward the token to the client now."""

    first_token: FirstToken


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInfo:
    """A hand-off that arrived complete."""

    blocks: tuple[BlockId, ...]
    """Destinations in order, after the held prefix; they belong to the owner from now on."""
    first_token: FirstToken | None
    """None when a known token follows the prompt."""
    cached_tokens: int
    """Prompt tokens that the prefill worker did not have to compute."""
    times: PhaseTimes
    """The prefill worker's timings; `transfer_s` is the time of its fetches and `exposed_s`."""
    exposed_s: float
    """From the seal to the commit: the part of this transfer that prefill did not hide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Receiver: the sequence joins the batch; answer with Committed."""

    info: CommitInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Revoke:
    """Receiver: close all grants; answer with Quiet for each lane through which no byte can be written any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFailed:
    """Receiver: report the failure to the owner, which gets the `landed` leading blocks: they are verified."""

    landed: tuple[BlockId, ...]
    failure: Failure
    expired: bool
    """Whether a lease ended, as opposed to a failure reported by either side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """Receiver: count and report these blocks as quarantined: their writer may still be running."""

    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseBlocks:
    """Receiver: free these blocks: nothing writes into them any more."""

    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitPrefill:
    """Sender: hand the job to the engine; answer with Submitted or SubmitRefused."""

    job: PrefillJob


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWrite:
    """Sender: write source blocks into these cells; answer with Written or WriteFailed."""

    seq: int
    rewrite: int
    cells: CellRange
    first_block: int
    """Index in the prompt of the first block of `sources`, in blocks of this worker."""
    sources: tuple[BlockId, ...]
    """All blocks of this worker that hold some of these cells."""
    lane: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortPrefill:
    """Sender: stop computing; the sources stay until ReleaseSources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelWrites:
    """Sender: stop reading sources; answer with WritesQuiet when nothing reads them any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseSources:
    """Sender: nothing reads the sources any more; the engine may free them."""


Action = (
    SendMessage
    | BindBlocks
    | OpenGrant
    | Verify
    | ForwardFirstToken
    | Commit
    | Revoke
    | ReportFailed
    | Quarantine
    | ReleaseBlocks
    | SubmitPrefill
    | StartWrite
    | AbortPrefill
    | CancelWrites
    | ReleaseSources
)
Actions = tuple[Action, ...]
