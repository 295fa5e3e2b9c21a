"""What a request needs before the engine has it is given up exactly once, whatever becomes of the request."""

import asyncio
import json
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.types.request import Request
from tandem.adapters.files import Adapter, read_adapter
from tandem.errors import Cancelled, DeadlineExceeded, InvalidRequest
from tandem.values.ids import BlockHash, RequestId
from tandem.values.sampling import SamplingParams
from tests.support.engine.ledger_host import parts, stopping
from tests.unit.worker.test_adapters import FakeMemory
from worker.engine_host import EngineHost


def request(name: str, **changes: Any) -> Request:
    return Request(
        request_id=RequestId(name),
        token_ids=array("i", [1, 2, 3]),
        num_prompt_tokens=3,
        params=SamplingParams(),
        hash_root=BlockHash(bytes(16)),
        **changes,
    )


def adapter(tmp_path: Path, name: str) -> Adapter:
    (path := tmp_path / name).mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 16}))
    (path / "adapter_model.safetensors").write_text(name)
    return read_adapter(name, path)


def started(memory: FakeMemory | None) -> EngineHost:
    store: Any = memory
    host = EngineHost(replace(parts(), adapters=store), on_fatal=lambda _: None)
    host.start(on_output=lambda _: None, ports=tuple)
    if memory is not None:
        memory.gate.set()
    return host


async def test_prepare_waits_for_an_adapter_until_release_or_deadline(tmp_path: Path) -> None:
    one, other = adapter(tmp_path, "a"), adapter(tmp_path, "b")
    host = started(FakeMemory(num_slots=1))
    async with stopping(host):
        first = request("first")
        await host.prepare(first, one)
        assert first.adapter_slot == 0
        assert list((await host.load()).resident_adapters) == [one.digest]
        with pytest.raises(DeadlineExceeded, match="while it waited for its adapter"):
            await host.prepare(request("late", deadline_s=time.monotonic() + 0.05), other)
        gone = request("gone")
        waiting = asyncio.create_task(host.prepare(gone, other))
        await asyncio.wait([waiting], timeout=0.05)
        assert (await host.load()).num_waiting == 1
        host.release(gone)
        with pytest.raises(Cancelled, match="ended while it waited for its adapter"):
            await waiting
        for _ in range(3):
            host.release(first)
        async with asyncio.timeout(20):
            await host.prepare(again := request("again"), other)
        assert list((await host.load()).resident_adapters) == [other.digest]
        host.release(again)


async def test_prepare_released_in_the_turn_of_its_grant_holds_no_adapter(tmp_path: Path) -> None:
    memory = FakeMemory(num_slots=1)
    host = started(memory)
    async with stopping(host):
        memory.gate.clear()
        gone = request("gone")
        waiting = asyncio.create_task(host.prepare(gone, adapter(tmp_path, "a")))
        await asyncio.wait([waiting], timeout=0.05)
        (hold,) = (task for task in asyncio.all_tasks() if "WorkerAdapters.hold" in repr(task.get_coro()))
        hold.add_done_callback(lambda _: host.release(gone))
        memory.gate.set()
        with pytest.raises(Cancelled, match="ended while it waited for its adapter"):
            await waiting
        async with asyncio.timeout(20):  # nobody holds the only slot
            await host.prepare(request("next"), adapter(tmp_path, "b"))


async def test_prepare_wrong_grammar_holds_no_adapter(tmp_path: Path) -> None:
    host = started(FakeMemory(num_slots=1))
    async with stopping(host):
        wrong = request("wrong")
        wrong.params = SamplingParams(grammar="x")
        with pytest.raises(InvalidRequest, match="grammar"):
            await host.prepare(wrong, adapter(tmp_path, "a"))
        async with asyncio.timeout(20):
            await host.prepare(request("next"), adapter(tmp_path, "b"))


async def test_prepare_without_adapters_here_is_refused(tmp_path: Path) -> None:
    host = started(None)
    async with stopping(host):
        with pytest.raises(InvalidRequest, match="takes no adapters"):
            await host.prepare(request("a"), adapter(tmp_path, "a"))
        await host.prepare(request("b"))
