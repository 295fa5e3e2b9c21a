"""Unwanted hand-offs end quickly; and a draining worker lends prefixes although it takes no prompts."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.protocol.messages import Abort, HandoffEnvelope, Hello, Prefill, PrefillJob, TransportOffer
from kv_transfer.protocol.versions import ADAPTERS
from kv_transfer.session.peer import LocalWorker
from kv_transfer.session.receiver_link import make_hello
from kv_transfer.session.sender_link import SenderLink
from kv_transfer.transports.in_process import MemoryFabric
from tandem.adapters.files import Adapter
from tandem.errors import Unavailable
from tandem.protocol.version_negotiation import VersionRange
from tandem.values.ids import BlockHash, TransferId
from tests.integration.handoff.test_failures import all_free, decoding, prefilling, wait_for
from tests.support.kv_transfer.handoff_fakes import begin, make_job

NAMES = tuple(BlockHash(bytes([i]) * 16) for i in range(1, 3))


def make_fetch(name: str) -> PrefillJob:
    return make_job(name, 0, token_ids=(), num_prompt_tokens=0, fetch=True, resume=True, names=NAMES)


async def test_job_cancelled_before_it_is_accepted_is_reported() -> None:
    fabric = MemoryFabric()
    async with decoding("memory", fabric=fabric) as (hub, owner), prefilling("memory", fabric=fabric) as worker:
        submitted, hurried = asyncio.Event(), asyncio.Event()
        unwanted: list[TransferId] = []
        take = worker.owner.submit

        async def slow(job: PrefillJob) -> None:
            submitted.set()
            await hurried.wait()
            await take(job)

        def hurry(transfer_id: TransferId) -> None:
            unwanted.append(transfer_id)
            hurried.set()

        worker.owner.submit = slow
        worker.hub.on_unwanted = hurry
        transfer = begin(hub, owner, make_job("a", 30), worker.route(1))
        async with asyncio.timeout(20):
            await submitted.wait()
        hub.cancel(transfer)
        await wait_for(lambda: unwanted)
        await wait_for(lambda: not worker.hub.num_transfers)
        assert unwanted == [transfer]
        assert all_free(worker.owner.pool)
        hurried.clear()

        hurried.set()
        transfer = begin(hub, owner, make_job("b", 30), worker.route(1))
        await owner.until(transfer, lambda r: r.committed)
        await hub.drain()
        assert unwanted == ["a"], "only who is given up in between"


async def test_handoff_aborted_with_its_order_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = MemoryFabric()
    async with decoding("memory", fabric=fabric) as (hub, owner), prefilling("memory", fabric=fabric) as worker:
        deliver = worker.hub._deliver

        def both(link: SenderLink, envelope: HandoffEnvelope) -> None:
            deliver(link, envelope)
            if isinstance(envelope.body, Prefill):  # in the same turn
                deliver(link, replace(envelope, body=Abort(reason="gone")))

        monkeypatch.setattr(worker.hub, "_deliver", both)
        transfer = begin(hub, owner, make_job("a", 30), worker.route(1))
        await wait_for(lambda: worker.hub.stats.started)
        await wait_for(lambda: not worker.hub.num_transfers)
        assert not worker.owner.jobs
        assert all_free(worker.owner.pool)
        hub.cancel(transfer)


async def test_prompt_with_an_adapter_is_not_ordered_of_an_older_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would compute the prompt without the adapter."""

    def older(local: LocalWorker, offers: Sequence[TransportOffer], **more: Any) -> Hello:
        hello = make_hello(local, offers, **more)
        return replace(hello, versions=VersionRange(hello.versions.oldest, ADAPTERS - 1))

    monkeypatch.setattr("kv_transfer.session.sender_link.make_hello", older)
    adapter = Adapter(name="sql", path=Path("/adapters/sql"), digest="ab" * 32, num_bytes=9)
    fabric = MemoryFabric()
    async with decoding("memory", fabric=fabric) as (hub, owner), prefilling("memory", fabric=fabric) as worker:
        transfer = begin(hub, owner, make_job("a", 30), worker.route(1))
        await owner.until(transfer, lambda r: r.committed)
        transfer = begin(hub, owner, replace(make_job("b", 30), adapter=adapter), worker.route(1))
        record = await owner.until(transfer, lambda r: r.errors)
        assert "too old for adapters" in record.errors[0].message
        assert [job.transfer_id for job in worker.owner.jobs] == ["a"]
        await hub.drain()


async def test_drained_prefill_worker_still_lends() -> None:
    fabric = MemoryFabric()
    async with decoding("memory", fabric=fabric) as (hub, owner), prefilling("memory", fabric=fabric) as worker:
        jobs: list[PrefillJob] = []

        async def submit(job: PrefillJob) -> None:
            jobs.append(job)
            raise Unavailable("nothing of it is here")

        worker.owner.gate.clear()
        first = begin(hub, owner, make_job("a", 30), worker.route(1))
        await wait_for(lambda: worker.owner.jobs)
        finishing = asyncio.create_task(worker.hub.finish_prompts())
        await asyncio.sleep(0)
        assert not finishing.done(), "a prompt is outstanding"

        worker.owner.submit = submit
        refused = begin(hub, owner, make_job("b", 30), worker.route(1))
        record = await owner.until(refused, lambda r: r.errors)
        assert record.errors[0].message == "prefill worker is draining"
        lent = begin(hub, owner, make_fetch("c"), worker.route(1))
        record = await owner.until(lent, lambda r: r.errors)
        assert record.errors[0].message == "nothing of it is here"
        assert [job.fetch for job in jobs] == [True]

        worker.owner.gate.set()
        await owner.until(first, lambda r: r.committed)
        await finishing
        await worker.hub.drain()
        over = begin(hub, owner, make_fetch("d"), worker.route(1))
        record = await owner.until(over, lambda r: r.errors)
        assert record.errors[0].message == "prefill worker is draining"
        for transfer in (refused, lent, over):
            hub.cancel(transfer)
