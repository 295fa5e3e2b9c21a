"""A bare client as decode worker: silent, gone or malformed."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc.aio

from kv_transfer.protocol.messages import TransportOffer
from kv_transfer.protocol.versions import SPOKEN
from kv_transfer.transports.catalogue import open_receivers, open_senders
from kv_transfer.transports.in_process import MemoryFabric
from tandem.protocol import wire
from tandem.v1 import handoff_pb2 as pb
from tandem.v1.handoff_pb2_grpc import HandoffStub
from tests.support.kv_transfer.handoff_fakes import (
    LAYOUT,
    SETTINGS,
    WAIT_S,
    Pool,
    prefill_worker,
)

IMPATIENT = replace(SETTINGS, lease_s=0.4, drain_s=0.1)


async def wait_for(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def all_free(pool: Pool) -> bool:
    return len(pool.free) == pool.num_blocks


def prefilling(choice: str, **options: object):
    fabric = options.pop("fabric", None)
    return prefill_worker(lambda region: open_senders(region, choice=choice, fabric=fabric), pool=Pool(64), **options)


async def test_killed_decode_worker_leaves_no_hold() -> None:
    """A bare client stands in for it, and hangs up without a word after it has requested a prefill."""
    fabric = MemoryFabric()
    pool = Pool(48)
    [receiver] = open_receivers(pool.region, choice="memory", fabric=fabric)
    async with prefilling("memory", fabric=fabric) as worker:
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stream = HandoffStub(channel).Connect()
            await stream.write(hello(receiver.offer()))
            assert (await stream.read()).WhichOneof("kind") == "hello"
            await stream.write(prefill_message("x", 30))
            await wait_for(lambda: worker.owner.blocks)
        await wait_for(lambda: all_free(worker.owner.pool))
        assert worker.hub.num_transfers == 0
    receiver.close()


async def test_silent_decode_worker_loses_its_hold() -> None:
    fabric = MemoryFabric()
    pool = Pool(48)
    [receiver] = open_receivers(pool.region, choice="memory", fabric=fabric)
    async with (
        prefilling("memory", fabric=fabric, settings=IMPATIENT) as worker,
        grpc.aio.insecure_channel(worker.address) as channel,
    ):
        stream = HandoffStub(channel).Connect()
        await stream.write(hello(receiver.offer()))
        await stream.read()
        await stream.write(prefill_message("x", 30))
        await wait_for(lambda: worker.owner.blocks)
        await wait_for(lambda: all_free(worker.owner.pool))
        stream.cancel()
    receiver.close()


def hello(offer: TransportOffer, **layout: object) -> pb.HandoffMessage:
    return pb.HandoffMessage(
        incarnation=77,
        hello=pb.HandoffHello(
            protocol_version=SPOKEN.newest,
            worker_id="d",
            layout=wire.layout_to_pb(replace(LAYOUT, **layout)),
            transports=[pb.TransportOffer(name=offer.name, advert=offer.advert, host_id=offer.host_id)],
        ),
    )


def prefill_message(name: str, num_tokens: int, **overrides: object) -> pb.HandoffMessage:
    fields = {
        "token_ids": [1] * num_tokens,
        "num_prompt_tokens": num_tokens,
        "request_id": "r",
        "hash_root": bytes(16),
        "lease_s": 2.0,
    }
    return pb.HandoffMessage(
        incarnation=77, addressee=11, transfer_id=name, attempt=1, prefill=pb.Prefill(**{**fields, **overrides})
    )


def message_to(
    name: str, *, attempt: int = 1, incarnation: int = 77, addressee: int = 11, **body: Any
) -> pb.HandoffMessage:
    """A message about one attempt."""
    return pb.HandoffMessage(incarnation=incarnation, addressee=addressee, transfer_id=name, attempt=attempt, **body)


async def test_malformed_messages_fail_only_their_own_handoff() -> None:
    fabric = MemoryFabric()
    pool = Pool(48)
    [receiver] = open_receivers(pool.region, choice="memory", fabric=fabric)
    async with (
        prefilling("memory", fabric=fabric) as worker,
        grpc.aio.insecure_channel(worker.address) as channel,
    ):
        stream = HandoffStub(channel).Connect()
        await stream.write(hello(receiver.offer()))
        await stream.read()
        bad = [
            prefill_message("bad1", 8, held_tokens=8),
            prefill_message("bad2", 8, held_tokens=3),
            prefill_message("bad3", 8, num_prompt_tokens=9),
            prefill_message("bad4", 8, hash_root=b"short"),
            prefill_message("bad5", 8, lease_s=float("nan")),
            prefill_message("bad6", 0),
            message_to("bad7"),
        ]
        for message in bad:
            await stream.write(message)
            reply = await stream.read()
            assert (reply.transfer_id, reply.WhichOneof("kind")) == (message.transfer_id, "reject")
            assert reply.reject.failure.code == "InvalidRequest"
        harmless = [
            pb.HandoffMessage(incarnation=77),
            message_to("x", addressee=12, abort=pb.Abort()),
            message_to("x", incarnation=78, abort=pb.Abort()),
            message_to("x", reserve=pb.Reserve(num_units=2**31)),
            message_to("y", attempt=3, commit_ack=pb.CommitAck()),
        ]
        for message in harmless:
            await stream.write(message)
        await stream.write(prefill_message("good", 8))
        while (reply := await stream.read()).transfer_id != "good":
            assert reply.WhichOneof("kind") in ("reject", "renew")
        assert reply.WhichOneof("kind") == "offer"
        for name in ("good", "never"):
            await stream.write(message_to(name, abort=pb.Abort()))
        drained = set()
        while drained != {"good", "never"}:
            reply = await stream.read()
            if reply.WhichOneof("kind") == "drained":
                drained.add(reply.transfer_id)
        await wait_for(lambda: all_free(worker.owner.pool))
        assert worker.hub.stats.bad_messages >= 8
        stream.cancel()
    receiver.close()
