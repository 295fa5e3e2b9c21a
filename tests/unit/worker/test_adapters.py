"""Adapters are loaded for the requests that name them, from the files that were ordered and no others."""

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tandem.adapters.files import Adapter, AdapterContent, read_adapter
from tandem.errors import AdapterUnavailable, ConfigError, InternalError, InvalidRequest, Overloaded, ServingError
from worker.adapters import WorkerAdapters

WAIT_S = 20.0


@dataclass(frozen=True)
class FakePacked:
    name: str
    num_bytes: int = 1


@dataclass
class FakeMemory:
    """Slots that only record."""

    capacity_bytes: int = 2
    num_slots: int = 2
    held: dict[int, str] = field(default_factory=dict)
    read_from: list[str] = field(default_factory=list)
    wrong: dict[str, str] = field(default_factory=dict)
    gate: threading.Event = field(default_factory=threading.Event)

    max_file_bytes: int = 1 << 20

    def read(self, content: AdapterContent) -> FakePacked:
        assert self.gate.wait(WAIT_S)
        name = content.weights.decode()
        self.read_from.append(name)
        if name in self.wrong:
            raise ConfigError(self.wrong[name])
        return FakePacked(name, 3 if name == "large" else 1)

    def put(self, slot: int, packed: FakePacked) -> None:
        if packed.name == "broken":
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        assert slot not in self.held
        self.held[slot] = packed.name

    def drop(self, slot: int) -> None:
        del self.held[slot]


async def call(change: Callable[[], None]) -> None:
    await asyncio.sleep(0)
    change()


def adapters(memory: FakeMemory, *, max_waiting: int = 8, is_open: bool = True) -> WorkerAdapters[FakePacked]:
    if is_open:
        memory.gate.set()
    return WorkerAdapters(memory, call=call, max_waiting=max_waiting)


def adapter(tmp_path: Path, name: str) -> Adapter:
    path = tmp_path / name
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 8}))
    (path / "adapter_model.safetensors").write_text(name)
    return read_adapter(name, path)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_hold_concurrent_is_read_once(tmp_path: Path) -> None:
    memory = FakeMemory()
    held, wanted = adapters(memory), adapter(tmp_path, "a")
    slots = await asyncio.gather(*(held.hold(wanted) for _ in range(5)))
    slots.append(await held.hold(wanted))
    assert (len(set(slots)), memory.read_from, memory.held) == (1, ["a"], {slots[0]: "a"})
    assert held.residents == (wanted.digest,)
    for slot in slots:
        held.release(slot)
    await held.close()


async def test_hold_without_room_waits_for_a_release(tmp_path: Path) -> None:
    memory = FakeMemory()
    held = adapters(memory)
    first, _ = [await held.hold(adapter(tmp_path, name)) for name in "ab"]
    waiting = asyncio.create_task(held.hold(adapter(tmp_path, "c")))
    done, _ = await asyncio.wait([waiting], timeout=0.05)
    assert not done
    assert held.num_waiting == 1
    held.release(first)
    async with asyncio.timeout(WAIT_S):
        assert await waiting == first
    assert sorted(memory.held.values()) == ["b", "c"]
    await held.close()


async def test_hold_cancelled_leaves_its_turn_to_the_next(tmp_path: Path) -> None:
    memory = FakeMemory(num_slots=1)
    held = adapters(memory)
    slot = await held.hold(adapter(tmp_path, "a"))
    gone, waiting = (asyncio.create_task(held.hold(adapter(tmp_path, name))) for name in "bc")
    await asyncio.wait([gone], timeout=0.05)
    gone.cancel()
    await settle()
    held.release(slot)
    async with asyncio.timeout(WAIT_S):
        await waiting
    assert memory.held == {0: "c"}
    await held.close()


async def test_hold_cancelled_in_the_turn_of_its_grant_holds_nothing(tmp_path: Path) -> None:
    memory = FakeMemory(num_slots=1)
    held, wanted = adapters(memory, is_open=False), adapter(tmp_path, "a")
    one, other = (asyncio.create_task(held.hold(wanted)) for _ in range(2))
    one.add_done_callback(lambda _: other.cancel())
    await settle()
    memory.gate.set()
    async with asyncio.timeout(WAIT_S):
        held.release(await one)
        await asyncio.wait([other])
        if not other.cancelled():
            held.release(other.result())
        assert await held.hold(adapter(tmp_path, "b")) == 0  # nobody holds the only slot
    await held.close()


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("odd", InvalidRequest, "adapter odd cannot be used: no such layer"),
        ("large", InvalidRequest, "adapter large cannot be used: it takes 3 bytes, engine.adapter_bytes leaves 2"),
        ("broken", InternalError, "the adapter could not be copied: RuntimeError"),
    ],
)
async def test_hold_unusable_is_refused(tmp_path: Path, name: str, kind: type[ServingError], reason: str) -> None:
    memory = FakeMemory(wrong={"odd": "no such layer"})
    held = adapters(memory)
    for _ in range(2):
        with pytest.raises(kind, match=reason):
            await held.hold(adapter(tmp_path, name))
    assert await held.hold(adapter(tmp_path, "a")) in (0, 1)
    assert (held.num_waiting, "a" in memory.held.values()) == (0, True)
    await held.close()


async def test_hold_unusable_is_read_once(tmp_path: Path) -> None:
    memory = FakeMemory(wrong={"odd": "no such layer"})
    held, wanted = adapters(memory), adapter(tmp_path, "odd")
    for name in ("odd", "same files"):
        with pytest.raises(InvalidRequest, match=f"adapter {name} cannot be used: no such layer"):
            await held.hold(replace(wanted, name=name))
    assert memory.read_from == ["odd"]
    await held.close()


async def test_hold_of_other_files_than_ordered_is_refused(tmp_path: Path) -> None:
    memory = FakeMemory(wrong={"b": "no such layer"})
    held, wanted = adapters(memory), adapter(tmp_path, "a")
    for other in (wanted, adapter(tmp_path, "b")):  # what is wrong with those is nobody's fault here
        with pytest.raises(AdapterUnavailable, match="this worker has another version of the adapter's files"):
            await held.hold(replace(other, digest="0" * 64))
    with pytest.raises(AdapterUnavailable, match="this worker cannot read the files of the adapter"):
        await held.hold(replace(wanted, path=tmp_path / "nowhere"))
    (wanted.path / "adapter_model.safetensors").write_text("a longer one")
    with pytest.raises(AdapterUnavailable, match="cannot read the files"):  # no more is read than was ordered
        await held.hold(wanted)
    assert memory.read_from == []
    await adapters(memory).hold(adapter(tmp_path, "a"))
    await held.close()


async def test_hold_uses_the_bytes_that_were_identified(tmp_path: Path) -> None:
    memory = FakeMemory()
    held, wanted = adapters(memory, is_open=False), adapter(tmp_path, "a")
    waiting = asyncio.create_task(held.hold(wanted))
    await asyncio.wait([waiting], timeout=0.2)
    (wanted.path / "adapter_model.safetensors").write_text("b")
    memory.gate.set()
    async with asyncio.timeout(WAIT_S):
        assert memory.held == {await waiting: "a"}
    await held.close()


async def test_hold_of_files_too_large_is_refused_unread(tmp_path: Path) -> None:
    memory = FakeMemory()
    held = adapters(memory)
    with pytest.raises(InvalidRequest, match=r"its weights have \d+ bytes, engine.adapter_bytes admits"):
        await held.hold(replace(adapter(tmp_path, "a"), num_bytes=memory.max_file_bytes + 1))
    assert memory.read_from == []
    await held.close()


async def test_hold_beyond_the_bound_is_refused(tmp_path: Path) -> None:
    memory = FakeMemory()
    held = adapters(memory, max_waiting=1, is_open=False)
    waiting = asyncio.create_task(held.hold(adapter(tmp_path, "a")))
    await settle()
    with pytest.raises(Overloaded, match="1 requests wait for adapters"):
        await held.hold(adapter(tmp_path, "b"))
    memory.gate.set()
    async with asyncio.timeout(WAIT_S):
        await waiting
    await held.close()


async def test_hold_of_resident_is_granted_beyond_the_bound(tmp_path: Path) -> None:
    memory = FakeMemory()
    held, resident = adapters(memory, max_waiting=1), adapter(tmp_path, "a")
    await held.hold(resident)
    memory.gate.clear()
    waiting = asyncio.create_task(held.hold(adapter(tmp_path, "b")))
    await settle()
    await held.hold(resident)
    memory.gate.set()
    async with asyncio.timeout(WAIT_S):
        await waiting
    await held.close()
