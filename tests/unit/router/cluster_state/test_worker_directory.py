"""Workers listed in Redis are used at once; an empty list is not trusted at once."""

import asyncio
from pathlib import Path

from router.cluster_state.worker_directory import KnownAddresses, RedisDirectory
from router.fleet.configured_workers import ConfiguredWorkers
from tandem.cluster_state.entries import Notice, Process
from tandem.rpc.worker_directory import WorkerAddress
from tandem.values.ids import Incarnation, WorkerId
from tandem.values.roles import WorkerRole


def at(address: str) -> WorkerAddress:
    return WorkerAddress(role=WorkerRole.DECODE, address=address)


def notice(address: str, incarnation: int = 1) -> Notice:
    process = Process(WorkerId("d"), Incarnation(incarnation))
    return Notice(process=process, role=WorkerRole.DECODE, address=address)


def test_known_addresses_unlisted_worker_is_forgotten_late() -> None:
    listing = KnownAddresses(frozenset({at("s:1")}), forget_s=30.0)
    assert listing.on_notices([notice("a:1"), notice("b:1")], 0.0) == {at("s:1"), at("a:1"), at("b:1")}
    assert listing.on_notices([], 100.0) == listing.addresses == {at("s:1"), at("a:1"), at("b:1")}, "flushed, perhaps"
    assert at("a:1") in listing.on_notices([notice("b:1")], 129.0)
    assert listing.on_notices([notice("b:1")], 130.0) == {at("s:1"), at("b:1")}
    assert listing.on_notices([], 200.0) == {at("s:1"), at("b:1")}, "it was there until now"


def test_known_addresses_two_processes_at_one_address_count_once() -> None:
    listing = KnownAddresses(frozenset(), forget_s=1.0)
    assert listing.on_notices([notice("a:1", 1), notice("a:1", 2)], 0.0) == {at("a:1")}


async def test_directory_watcher_receives_every_change() -> None:
    directory = RedisDirectory(KnownAddresses(frozenset({at("s:1")}), forget_s=1.0))
    watching = directory.watch()
    assert await anext(watching) == {at("s:1")}
    directory.on_notices([notice("a:1")], 0.0)
    directory.on_notices([notice("a:1")], 0.1)
    assert await anext(watching) == {at("s:1"), at("a:1")}
    waiting = asyncio.ensure_future(anext(watching))
    await asyncio.sleep(0)
    directory.on_notices([notice("a:1")], 0.2)
    await asyncio.sleep(0)
    assert not waiting.done(), "nothing changed"
    directory.on_notices([notice("a:1"), notice("b:1")], 0.3)
    assert await waiting == {at("s:1"), at("a:1"), at("b:1")}


async def test_directory_reload_changes_only_configured_addresses(tmp_path: Path) -> None:
    """SIGHUP of a router with Redis keeps workers that the file never named."""
    path = tmp_path / "cluster.yaml"
    directory = RedisDirectory(KnownAddresses(frozenset({at("s:1")}), forget_s=30.0))
    directory.on_notices([notice("a:1")], 0.0)
    watching = directory.watch()
    assert await anext(watching) == {at("s:1"), at("a:1")}
    stated = ConfiguredWorkers(path, directory.state)
    for named, expected in (('["t:1"]', {"t:1", "a:1"}), ('["t:1", "u:1"]', {"t:1", "u:1", "a:1"}), ("[]", {"a:1"})):
        path.write_text(f"decode: {{addresses: {named}}}")
        await asyncio.to_thread(stated.read)
        assert await anext(watching) == {at(address) for address in expected}
    directory.on_notices([notice("a:1"), notice("t:1")], 1.0)
    path.write_text('decode: {addresses: ["a:1", "t:1"]}')
    await asyncio.to_thread(stated.read)
    directory.on_notices([], 2.0)
    directory.on_notices([], 99.0)
    assert await anext(watching) == {at("a:1"), at("t:1")}, "each once, and as long as it is named"
