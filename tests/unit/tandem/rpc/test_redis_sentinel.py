"""Which server sentinels that disagree are taken to name."""

import asyncio

import pytest

from tandem.cluster_state.redis_settings import Address, SentinelSettings
from tandem.rpc.redis_sentinel import MasterFinder, NoMaster

A, B = ("10.0.0.1", 6379), ("10.0.0.2", 6379)


class Sentinels:
    """Sentinels at hosts s0, s1, ..., each with the master that it names, if it answers, and that one's epoch."""

    def __init__(self, *named: Address | None, epochs: tuple[int, ...] = (), timeout_s: float = 0.05) -> None:
        self.named = named
        self.epochs = epochs
        self.asked: list[tuple[str, str]] = []
        addresses = tuple((f"s{index}", 26379) for index in range(len(named)))
        settings = SentinelSettings(addresses=addresses, master="mymaster")
        self.finder = MasterFinder(settings, self.ask, timeout_s=timeout_s)

    async def ask(self, sentinel: Address, command: tuple[str, ...]) -> object:
        assert command[0] == "SENTINEL"
        assert command[2] == "mymaster"
        self.asked.append((sentinel[0], command[1]))
        index = int(sentinel[0][1:])
        named = self.named[index]
        if named is None:
            await asyncio.Event().wait()
            raise AssertionError
        if command[1] == "GET-MASTER-ADDR-BY-NAME":
            return [named[0].encode(), str(named[1]).encode()]
        if not self.epochs:
            raise NoMaster("NOPERM")
        return [b"name", b"mymaster", b"config-epoch", str(self.epochs[index]).encode(), b"quorum", b"2"]


@pytest.mark.parametrize(
    ("named", "epochs", "found"),
    [
        ((A, B, B), (), B),
        ((A, None, B, B), (), B),
        ((A, None, None), (), A),
        ((A, B), (3, 4), B),
        ((A, B), (4, 3), A),
        ((A, B, B, A), (7, 5, 8, 6), B),
        # Without an answer to that, the sentinel that was asked first.
        ((A, B), (), A),
    ],
)
async def test_recheck_follows_most_sentinels_and_then_the_newest(
    named: tuple[Address | None, ...], epochs: tuple[int, ...], found: Address
) -> None:
    assert await Sentinels(*named, epochs=epochs).finder.find_by_majority() == found


async def test_recheck_without_any_answer_finds_no_master() -> None:
    with pytest.raises(NoMaster):
        await Sentinels(None, None).finder.find_by_majority()


async def test_search_after_a_recheck_begins_with_a_sentinel_of_the_majority() -> None:
    sentinels = Sentinels(A, B, B)
    assert await sentinels.finder.find() == A
    await sentinels.finder.find_by_majority()
    sentinels.asked.clear()
    assert await sentinels.finder.find() == B
    assert sentinels.asked == [("s1", "GET-MASTER-ADDR-BY-NAME")]


async def test_cancelled_recheck_leaves_no_question_behind() -> None:
    sentinels = Sentinels(None, None, timeout_s=600.0)
    search = asyncio.create_task(sentinels.finder.find_by_majority())
    await asyncio.sleep(0.01)
    search.cancel()
    with pytest.raises(asyncio.CancelledError):
        await search
    assert asyncio.all_tasks() == {asyncio.current_task()}
