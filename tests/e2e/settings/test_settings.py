"""Every row of the table: a cluster with these settings answers as it should, and does what they say."""

from contextlib import AsyncExitStack

import pytest

from tests.e2e.settings.row import MAX_TOKENS, Asked, check_answers, prompts
from tests.e2e.settings.table import ROWS
from tests.support.engine.paged_harness import needs
from tests.support.running_cluster import running

_IN_TEN, _TURNS = 10, 4


def _marks(number: int) -> tuple[pytest.MarkDecorator, ...]:
    """A tenth of the rows in each run of `make test`, by turns; the others are the nightly's."""
    turn = number % _IN_TEN
    return (pytest.mark.turn(turn),) if turn < _TURNS else (pytest.mark.slow,)


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(number)) for number, name in enumerate(ROWS)])
async def test_cluster_with_these_settings_answers_alike_and_does_what_they_say(name, fork_servers, oracle, tmp_path):
    row = ROWS[name]
    if row.needs is not None:
        needs(row.needs)
    async with AsyncExitStack() as stack:
        names = {"folder": tmp_path, **await row.start(tmp_path, stack)}
        made = prompts(oracle)
        expected = (
            [oracle.tokens(prompt, MAX_TOKENS) for prompt in made]
            if row.expected is None
            else row.expected(oracle, made, tmp_path)
        )
        believes = row.believes(tmp_path) if row.believes is not None else None
        cluster = await stack.enter_async_context(
            running(command=fork_servers.command, believes=believes, key=row.key, **row.named(names))
        )
        asked = Asked(cluster=cluster, oracle=oracle, folder=tmp_path, names=names)
        await check_answers(row, asked, expected)
        await row.check(asked)
        await cluster.until_idle()
