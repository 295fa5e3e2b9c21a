"""What stands in Redis, what a client brings from one router to another, and names that all must make alike."""

from collections.abc import Callable

from router.admission.shared_rate_limits import tenant_tags
from router.api.answer.stream_ids import StreamIds
from router.types.request_digest import request_digest
from router.types.stream_position import ChoicePosition, StreamHead
from tandem.cluster_state import entries
from tandem.cluster_state.redis_keys import ClusterStateKeys
from tandem.values.block_hash import BlockHasher, root_hash
from tandem.values.ids import BlockHash, Incarnation, WorkerId
from tandem.values.roles import WorkerRole

from .sample import NAMES, SECRET, Sample, facts

WRITTEN_S = 1_800_000_000
CODEC = entries.ClusterStateCodec(SECRET, "samples")
_PROCESS = entries.Process(WorkerId("decode-0"), Incarnation(7))
_NOTICE = entries.Notice(process=_PROCESS, role=WorkerRole.DECODE, address="10.0.0.1:7000")
_FOOTPRINT = entries.Footprint(next_sequence=9, state_sequence=4, num_entries=2)
_CHANGES = entries.Changes(first_sequence=5, changes=((NAMES[0], True), (NAMES[1], False)))
_SHARE = entries.Share(
    process=_PROCESS, report_number=3, backlog_tokens=100, num_requests=2, backlog_since=40, num_since=1
)
_TALLY = entries.TenantTally(tenant=bytes(range(16)), epoch=2, requests=3, tokens=400, num_inflight=1)
_LOAD = entries.RouterLoad(
    router=Incarnation(99), sequence=4, shares=(_SHARE,), tallies=(_TALLY,), hears=(Incarnation(98),)
)


def board_samples() -> dict[str, Sample]:
    codec = CODEC
    return {
        "board/worker": Sample(
            write=lambda: codec.seal_notice(_NOTICE), read=lambda data: facts(codec.open_notice(data, _PROCESS))
        ),
        "board/head": Sample(
            write=lambda: codec.seal_head(_PROCESS, _FOOTPRINT),
            read=lambda data: facts(codec.open_head(data, _PROCESS)),
        ),
        "board/changes": Sample(
            write=lambda: codec.seal_changes(_PROCESS, _CHANGES),
            read=lambda data: facts(codec.open_changes(data, _PROCESS)),
        ),
        "board/state": Sample(
            write=lambda: codec.seal_state(_PROCESS, 12, NAMES),
            read=lambda data: facts(codec.open_state(data, _PROCESS)),
        ),
        "board/load": Sample(
            write=lambda: codec.seal_load(_LOAD), read=lambda data: facts(codec.open_load(data, _LOAD.router))
        ),
    }


def stream_samples() -> dict[str, Sample]:
    ids = StreamIds(SECRET, most_s=600.0, wall_clock=lambda: float(WRITTEN_S))
    head = StreamHead(request_id="ab" * 16, seed=7, created_s=WRITTEN_S, digest=bytes(range(16)), resumptions=1)
    choice = ChoicePosition(worker=Incarnation(8), num_tokens=5, num_chars=20, ended=True)
    return {
        "stream/id": Sample(
            write=lambda: ids.write(head, [choice], usage_sent=True),
            read=lambda data: facts(ids.read(data.decode("ascii"))),
        )
    }


def same_samples() -> dict[str, Sample]:
    made: dict[str, Callable[[], bytes]] = {
        "block-names": _block_names,
        "board-keys": _board_keys,
        "tenant-tag": lambda: tenant_tags(SECRET)("tenant"),
        "request-digest": lambda: request_digest(range(100), "a", 1, None),
    }
    return {f"same/{name}": Sample(write=write, read=bytes.hex) for name, write in made.items()}


def _block_names() -> bytes:
    root = root_hash(secret=SECRET, model_fingerprint="m", adapter="a", salt="s")
    chain: list[BlockHash] = []
    BlockHasher(SECRET).extend(root, chain, range(100))
    return b"".join([root, *chain])


def _board_keys() -> bytes:
    keys = ClusterStateKeys("samples")
    of_process = (keys.notice, keys.head, keys.state, keys.log)
    found = [keys.workers, keys.routers, *(key(_PROCESS) for key in of_process), keys.load(Incarnation(99))]
    return "\n".join(found).encode()
