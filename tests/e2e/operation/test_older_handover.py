"""A lone router of an earlier revision hands its listeners to today's and back: its real code, from git."""

import pytest

from tests.e2e.operation.test_rolling_restart import answered, loaded, running_lone_router
from tests.previous.release import Release
from tests.support.running_cluster import running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
LAST_OF_ITS_KIND = {
    "knows no question": "b6bb932e7e0280055ea3641e4ce97334caf98413",
    "asks and tells on one connection": "7b16ddc95ef4f97bac5d1147afd38329659df570",
}
"""The last revision of each way in which lone routers have met before today's."""


@pytest.mark.parametrize("revision", LAST_OF_ITS_KIND.values(), ids=LAST_OF_ITS_KIND)
async def test_listeners_hand_over_between_revisions_under_load(fork_servers, oracle, tmp_path, revision):
    code, place = tmp_path / "code", tmp_path / "place"
    code.mkdir()
    place.mkdir()
    earlier = Release(code, revision)
    async with running(command=fork_servers.command) as cluster, running_lone_router(cluster, place) as lone:
        await lone.start(release=earlier)
        async with loaded(cluster, oracle, 9760, lone) as load:
            for release in (None, earlier):
                await answered(load)
                await lone.start(release=release)
            await answered(load)
