"""One batch: two real workers with a bad network between them, and what became of each of their hand-offs."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

import grpc.aio

from kv_transfer.memory.region import KVRegion
from kv_transfer.protocol.messages import PrefillJob
from kv_transfer.regions.local import LocalReceivingRegion, LocalSendingRegion
from kv_transfer.session.peer import LocalWorker, Route
from kv_transfer.session.receiver_hub import ReceiverHub
from kv_transfer.session.receiver_link import Dialer
from kv_transfer.session.sender_hub import SenderHub
from tandem.rpc.cluster_grpc import CLIENT_OPTIONS, SERVER_OPTIONS
from tandem.values.ids import BlockHash, Incarnation, RequestId, TransferId, WorkerId
from tandem.values.kv_layout import KVLayout
from tandem.values.sampling import SamplingParams
from tests.proofs.faults.content import Content
from tests.proofs.faults.ends import Ends
from tests.proofs.faults.impatience import LONG_SILENCE_S, WAIT_S, ends_in, settings
from tests.proofs.faults.network.injector import Injector
from tests.proofs.faults.owners import DecodeOwner, PrefillOwner, Record
from tests.proofs.faults.plan import BatchPlan, Kind, Place, TransferPlan
from tests.proofs.faults.pools import GuardedPool
from tests.proofs.faults.talk import FaultyChannel, HandoffMessages

_MAX_ATTEMPTS = 8
_PREFILL, _DECODE = Incarnation(11), Incarnation(22)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of one hand-off that was hit."""

    outcome: str
    faults: Counter[tuple[Kind, Place]]


@dataclass(slots=True, kw_only=True)
class BatchReport:
    """What became of a batch."""

    ended: list[Ended] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    num_undisturbed: int = 0
    num_quarantined: int = 0
    """Blocks that ever were."""


class Batch:
    """Runs one plan, once. `only`: the index of the one transfer that is run."""

    def __init__(self, plan: BatchPlan, ends: Ends, only: int | None = None) -> None:
        self._plan, self._ends = plan, ends
        chosen = plan.transfers if only is None else (plan.transfers[only],)
        self._injector = Injector(plan.transfers, plan.greetings)
        self._unit = min(plan.source.block_size, plan.destination.block_size)
        self._records = {TransferId(p.name): self._record(p) for p in chosen}
        self._messages = HandoffMessages(self._injector, LONG_SILENCE_S)
        # Little more than all of them need at once, so that freed blocks are taken again soon.
        self._here = GuardedPool(plan.source, self._room(plan.source, 1), plan.seed)
        self._there = GuardedPool(plan.destination, self._room(plan.destination, 2), plan.seed + 1)
        self._prefill = PrefillOwner(self._here, plan.source, lambda transfer_id: self._records[transfer_id])
        self._decode = DecodeOwner(self._there, plan.destination)
        self._decode.records = self._records
        self._route = partial(Route, worker_id=WorkerId("p"), incarnation=_PREFILL)
        self._report = BatchReport()

    async def run(self) -> BatchReport:
        """Every hand-off to its end, and the workers too. Errors of the hubs themselves are violations."""
        try:
            if not await ends_in(self._run(), 3 * WAIT_S):
                self._report.violations.append("the workers did not stop")
        except ExceptionGroup as group:
            self._report.violations += [f"a hub broke: {error!r}" for error in group.exceptions]
        for pool, whose in ((self._here, "prefill"), (self._there, "decode")):
            pool.check_all(whose)
        self._report.violations += [
            *self._here.violations,
            *self._there.violations,
            *self._decode.violations,
            *self._injector.violations,
        ]
        self._prefill.hub = None
        self._here.close()
        self._there.close()
        self._count()
        return self._report

    async def _run(self) -> None:
        plan = self._plan
        times = settings(chunk_bytes=plan.chunk_bytes, wire_dtype=plan.wire_dtype, write_window=plan.write_window)
        async with AsyncExitStack() as stack:
            receivers = [self._ends.receiver(plan, region, self._injector) for region in self._there.regions]
            regions = [
                LocalSendingRegion(region, (self._ends.sender(plan, region, self._injector, receivers.__getitem__),))
                for region in self._here.regions
            ]
            local = _local("p", _PREFILL, self._here.regions[0])
            sending = await stack.enter_async_context(
                SenderHub(local, owner=self._prefill, regions=regions, settings=times)
            )
            self._prefill.hub = sending
            server = grpc.aio.server(options=SERVER_OPTIONS)
            sending.register(server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            self._route = partial(self._route, address=f"127.0.0.1:{port}")
            local = _local("d", _DECODE, self._there.regions[0])
            there = [
                LocalReceivingRegion(region, (receiver,))
                for region, receiver in zip(self._there.regions, receivers, strict=True)
            ]
            receiving = await stack.enter_async_context(
                ReceiverHub(local, owner=self._decode, regions=there, dialer=self._dialer(), settings=times)
            )
            await self._transfer_all(receiving)
            await self._assert_resources_released(receiving, sending)

    def _dialer(self) -> Dialer:
        options = (*CLIENT_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        return Dialer(
            open_channel=lambda address: FaultyChannel(
                grpc.aio.insecure_channel(address, options=options), self._messages
            )
        )

    async def _transfer_all(self, hub: ReceiverHub) -> None:
        if self._plan.one_at_a_time:
            for record in self._records.values():
                await self._transfer(hub, record)
        else:
            await asyncio.gather(*(self._transfer(hub, record) for record in self._records.values()))

    async def _transfer(self, hub: ReceiverHub, record: Record) -> None:
        plan, transfer_id = record.plan, TransferId(record.plan.name)
        await asyncio.sleep(plan.starts_s)
        self._injector.begin(transfer_id)
        hub.start(self._job(plan), self._route(attempt=1))
        cancelling = None
        if plan.cancel_s is not None:
            cancelling = asyncio.get_running_loop().call_later(plan.cancel_s, self._cancel, hub, record, "cancelled")
        if not await ends_in(self._retry_until_over(hub, record), WAIT_S):
            self._report.violations.append(f"{plan.name}: did not end")
            self._cancel(hub, record, "did not end")
        if cancelling is not None:
            cancelling.cancel()
        if self._plan.one_at_a_time:
            await ends_in(hub.drain(), WAIT_S)
            self._injector.end(transfer_id)

    async def _retry_until_over(self, hub: ReceiverHub, record: Record) -> None:
        while not record.over:
            await record.changed.wait()
            record.changed.clear()
            num_failures = len(record.errors)
            if record.over or num_failures == record.num_failures_seen:
                continue
            record.num_failures_seen = num_failures
            if num_failures == _MAX_ATTEMPTS:
                self._cancel(hub, record, "failed too often")
                return
            await asyncio.sleep(record.errors[-1].retry_after_s or 0.005 * num_failures)
            if not record.over:
                hub.reroute(TransferId(record.plan.name), self._route(attempt=num_failures + 1))

    def _cancel(self, hub: ReceiverHub, record: Record, reason: str) -> None:
        if not record.over:
            hub.cancel(TransferId(record.plan.name), reason)
            self._decode.end(TransferId(record.plan.name))

    async def _assert_resources_released(self, receiving: ReceiverHub, sending: SenderHub) -> None:
        """Every lease, pin, grant and quarantine ends by itself."""
        if not (await ends_in(receiving.drain(), WAIT_S / 2) and await ends_in(sending.drain(), WAIT_S / 2)):
            self._report.violations.append("leases, pins or quarantine did not end")
        for transfer_id in self._records:
            self._injector.end(transfer_id)
        self._report.num_quarantined = self._decode.num_quarantined
        held = {
            "leased blocks": receiving.num_leased_blocks,
            "pinned blocks": sending.num_pinned_blocks,
            "quarantined blocks": receiving.stats.quarantined_blocks + len(self._decode.quarantined),
            "transfers": receiving.num_transfers + sending.num_transfers,
        }
        self._report.violations += [f"at rest there are {count} {what}" for what, count in held.items() if count]
        self._decode.give_back()

    def _count(self) -> None:
        for transfer_id, record in self._records.items():
            faults = self._injector.faults(transfer_id)
            if not faults:
                self._report.num_undisturbed += 1
                continue
            again = bool(record.errors) or record.plan.name in self._messages.nacks
            if record.committed:
                outcome = "committed after a retry" if again else "committed"
            else:
                outcome = "cancelled" if record.plan.cancel_s is not None else "failed cleanly"
            self._report.ended.append(Ended(outcome=outcome, faults=faults))

    def _record(self, plan: TransferPlan) -> Record:
        num_tokens = -(-plan.num_tokens // self._unit) * self._unit
        return Record(plan=plan, content=Content(self._plan, num_tokens, plan.seed), held_tokens=plan.held_tokens)

    def _room(self, kv: KVLayout, spare: int) -> int:
        sizes = [-(-record.plan.num_tokens // kv.block_size) * len(kv.groups) for record in self._records.values()]
        return sum(sizes) + spare * max(sizes)

    def _job(self, plan: TransferPlan) -> PrefillJob:
        return PrefillJob(
            transfer_id=TransferId(plan.name),
            request_id=RequestId(plan.name),
            token_ids=tuple(range(plan.num_tokens)),
            num_prompt_tokens=plan.num_tokens,
            held_tokens=plan.held_tokens,
            sampling=SamplingParams(),
            hash_root=BlockHash(bytes(16)),
        )


def _local(name: str, incarnation: Incarnation, region: KVRegion) -> LocalWorker:
    return LocalWorker(
        worker_id=WorkerId(name), incarnation=incarnation, layout=region.layout, num_blocks=region.num_blocks
    )
