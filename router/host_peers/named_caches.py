"""Replicates named caches among router processes on one host, over sockets in a folder that only their user can enter.

A process that changes one sends it to each of the others before its client gets the answer, so that the client's next
request finds it whichever process serves it. To a process that does not accept it in time, because it hangs, it is sent
again until it does, or is gone. A starting process first listens and then fetches everything that the others have, so
that it misses no change.
"""

import asyncio
import contextlib
import logging
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import orjson

from router.api.request.named_caches import NamedCache
from router.api.request.shared_named_caches import NamedCacheUpdate, PinLocation, SharedNamedCaches
from router.text.conversation import Message
from router.text.tools import AssistantToolCall
from router.types.worker_view import WorkerKey
from tandem.values.ids import BlockHash, Incarnation, WorkerId

ANSWER_S = 0.5
"""Time for another process to accept a change."""
_BEGIN_S = 5.0
"""Time for another process to send everything that it has."""
_AGAIN_S = 0.5
_SIZE_BYTES = 4
_MOST_BYTES = 64 << 20
_log = logging.getLogger(__name__)


class NamedCacheExchange:
    """Sends the changes of this process to the others, and applies theirs; an async context manager."""

    def __init__(self, folder: Path, *, index: int, names: SharedNamedCaches) -> None:
        self._folder = folder
        self._path = folder / f"named-{index}.sock"
        self._names = names
        self._server: asyncio.Server | None = None
        self._num_changes = 0
        self._unsent: dict[Path, dict[tuple[str, str], int]] = {}
        """Names whose changes another process has not accepted yet, with the number of the change."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Listen, then fetch the others' caches. Raises OSError when the folder is not writable."""
        self._path.unlink(missing_ok=True)  # left by an earlier process
        self._server = await asyncio.start_unix_server(self._answer, self._path)
        self._path.chmod(0o600)
        await asyncio.gather(*map(self._fetch_all, self._others()))
        self._task = asyncio.create_task(self._republish())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def publish(self, tenant: str, name: str) -> None:
        """Send a change; return when the others have accepted it, or had their time."""
        self._num_changes += 1
        for path in self._others():
            self._unsent.setdefault(path, {})[tenant, name] = self._num_changes
        await asyncio.gather(*map(self._send, tuple(self._unsent)))

    def _others(self) -> list[Path]:
        return [path for path in sorted(self._folder.glob("named-*.sock")) if path != self._path]

    async def _republish(self) -> None:
        while True:
            await asyncio.sleep(_AGAIN_S)
            await asyncio.gather(*map(self._send, tuple(self._unsent)))

    async def _send(self, path: Path) -> None:
        unsent = dict(self._unsent.get(path, {}))
        if path not in self._others():
            self._unsent.pop(path, None)  # it fetches everything when it starts again
        elif unsent and await _exchange(path, [self._names.update_for(*name) for name in unsent], ANSWER_S) is not None:
            self._note_sent(path, unsent)

    def _note_sent(self, path: Path, sent: dict[tuple[str, str], int]) -> None:
        left = {name: number for name, number in self._unsent.get(path, {}).items() if sent.get(name) != number}
        if left:
            self._unsent[path] = left
        else:
            self._unsent.pop(path, None)

    async def _fetch_all(self, path: Path) -> None:
        for update in await _exchange(path, [], _BEGIN_S) or ():
            self._names.apply(update)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Apply what the peer sends; a peer that sends nothing is sent everything."""
        try:
            updates = await _read(reader)
            for update in updates:
                self._names.apply(update)
            await _write(writer, [] if updates else self._names.all_updates())
        except (OSError, asyncio.IncompleteReadError):
            pass  # it has ended
        except _BadUpdate as error:
            _log.error("an update of a named cache by another router process is malformed: %s", error)
        finally:
            writer.close()


class _BadUpdate(Exception):
    """A frame is not a valid update of a named cache."""


async def _exchange(path: Path, updates: list[NamedCacheUpdate], most_s: float) -> list[NamedCacheUpdate] | None:
    """Send updates and return the answer; None when there is none in time."""
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError, _BadUpdate):
        async with asyncio.timeout(most_s):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                await _write(writer, updates)
                return await _read(reader)
            finally:
                writer.close()
    return None


async def _write(writer: asyncio.StreamWriter, updates: list[NamedCacheUpdate]) -> None:
    """Write frame by frame; an empty frame marks the end."""
    for update in updates:
        frame = _encoded(update)
        writer.write(len(frame).to_bytes(_SIZE_BYTES, "little") + frame)
        await writer.drain()
    writer.write(bytes(_SIZE_BYTES))
    await writer.drain()


async def _read(reader: asyncio.StreamReader) -> list[NamedCacheUpdate]:
    updates = []
    while size := int.from_bytes(await reader.readexactly(_SIZE_BYTES), "little"):
        if size > _MOST_BYTES:
            raise _BadUpdate(f"{size} bytes")
        updates.append(_decoded(await reader.readexactly(size)))
    return updates


def _encoded(update: NamedCacheUpdate) -> bytes:
    pin = update.pin
    place = None if pin is None else [*pin.worker, pin.num_tokens, pin.last_block.hex()]
    shown = {"tenant": update.tenant, "name": update.name, "cache": update.cache, "pin": place}
    return orjson.dumps(shown, default=msgspec.structs.asdict)  # a conversation's messages


def _decoded(frame: bytes) -> NamedCacheUpdate:
    try:
        fields = orjson.loads(frame)
        cache = None if fields["cache"] is None else _cache(fields["cache"])
        return NamedCacheUpdate(tenant=fields["tenant"], name=fields["name"], cache=cache, pin=_place(fields["pin"]))
    except (ValueError, TypeError, KeyError) as error:
        raise _BadUpdate(str(error)) from None


def _cache(fields: dict[str, Any]) -> NamedCache:
    messages = tuple(
        Message(**message | {"tool_calls": tuple(AssistantToolCall(**call) for call in message["tool_calls"])})
        for message in fields["messages"]
    )
    return NamedCache(**fields | {"messages": messages, "token_ids": tuple(fields["token_ids"])})


def _place(fields: list[Any] | None) -> PinLocation | None:
    if fields is None:
        return None
    worker_id, incarnation, num_tokens, last_block = fields
    worker = WorkerKey(WorkerId(worker_id), Incarnation(incarnation))
    return PinLocation(worker=worker, num_tokens=num_tokens, last_block=BlockHash(bytes.fromhex(last_block)))
