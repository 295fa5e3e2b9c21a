"""A blocking call's result is closed by another call whatever happens meanwhile, and the loop keeps running."""

import asyncio
import threading

import pytest

from cluster.ray.session import held

WAIT_S = 20.0


class Room:
    """A resource that is opened and closed by calls that block until the test allows them."""

    def __init__(self):
        self.may_be_made, self.may_end = threading.Event(), threading.Event()
        self.requested, self.ending, self.ended = threading.Event(), threading.Event(), threading.Event()

    def make(self):
        self.requested.set()
        assert self.may_be_made.wait(WAIT_S)
        return self

    def end(self, room):
        assert room is self
        self.ending.set()
        assert self.may_end.wait(WAIT_S)
        self.ended.set()

    async def use(self, end_s=WAIT_S):
        async with held(self.make, self.end, end_s=end_s) as room:
            assert room is self


async def happens(event):
    """Wait for a thread, while the loop runs."""
    assert await asyncio.to_thread(event.wait, WAIT_S)


async def test_held_session_is_opened_and_closed():
    room = Room()
    room.may_be_made.set()
    room.may_end.set()
    await room.use()
    assert room.ended.is_set()


async def test_held_session_cancelled_while_opening_is_closed_later():
    room = Room()
    room.may_end.set()
    user = asyncio.ensure_future(room.use())
    await happens(room.requested)
    user.cancel()
    with pytest.raises(asyncio.CancelledError):
        await user
    assert not room.ended.is_set()
    room.may_be_made.set()
    await happens(room.ended)


async def test_held_session_slow_close_is_not_waited_for():
    room = Room()
    room.may_be_made.set()
    await room.use(end_s=0.01)
    assert not room.ended.is_set()
    room.may_end.set()
    await happens(room.ended)


async def test_held_session_cancelled_while_closing_still_closes():
    room = Room()
    room.may_be_made.set()
    user = asyncio.ensure_future(room.use())
    await happens(room.ending)
    user.cancel()
    with pytest.raises(asyncio.CancelledError):
        await user
    room.may_end.set()
    await happens(room.ended)


async def test_held_session_failed_open_raises():
    def refuse():
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        async with held(refuse, lambda _: None, end_s=1.0):
            pass
