"""kill -9 and SIGSTOP during transfers: answers stay right, and blocks are freed when that is safe."""

import asyncio
import os
import signal
from itertools import count

import pytest
import pytest_asyncio

from tests.proofs.kills.campaign import PATIENT, SHAPE, WITHIN, Campaign, Workers, private_ranks
from tests.proofs.kills.clients import MAX_TOKENS, RIGHT, Clients, known_prompts
from tests.proofs.kills.table import lines
from tests.support.running_cluster import running

pytestmark = pytest.mark.asyncio(loop_scope="module")
TRIES = 20
SEED = 3


@pytest.fixture(scope="module")
def prompts(oracle):
    return known_prompts(oracle, 6, seed=SEED)


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["shm", "tcp"])
async def workers(request, fork_servers):
    async with running(
        command=fork_servers.command, policy=PATIENT, transfer__transport=request.param, **SHAPE
    ) as cluster:
        yield Workers(cluster, fork_servers.folder)


def transport(workers):
    return workers.cluster.local.config.transfer.transport


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_kills", [4, pytest.param(200, marks=pytest.mark.slow)])
async def test_workers_killed_mid_transfer_corrupt_nothing(workers, prompts, num_kills):
    report = await Campaign(workers, prompts, seed=num_kills).run(num_kills)
    print(transport(workers), *lines(report), sep="\n")
    assert not report.problems, "\n".join(lines(report))
    assert len(report.kills) == num_kills
    assert report.outcomes[RIGHT] > num_kills


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("sizes", "num_kills"), [((2, 2), 200), ((1, 4), 20), ((4, 1), 20), ((2, 4), 20)], ids=["2-2", "1-4", "4-1", "2-4"]
)
async def test_killed_workers_and_ranks_with_kv_of_their_own_corrupt_nothing(fork_servers, prompts, sizes, num_kills):
    shape = SHAPE | private_ranks(*sizes)
    async with running(command=fork_servers.command, policy=PATIENT, transfer__transport="tcp", **shape) as cluster:
        workers = Workers(cluster, fork_servers.folder)
        report = await Campaign(workers, prompts, seed=num_kills, num_clients=16).run(num_kills)
    print(*lines(report), sep="\n")
    assert not report.problems, "\n".join(lines(report))
    assert len(report.kills) == num_kills
    assert report.num_ranks_killed
    assert report.outcomes[RIGHT] > num_kills


async def freeze_a_writer(workers, clients, prompts):
    """Stop a prefill worker mid-transfer; returns its name, its state, and the requests."""
    requests = []
    for attempt in range(TRIES):
        long = sorted(prompts, key=lambda prompt: -len(prompt.token_ids))[:3]
        requests += [
            asyncio.ensure_future(clients.ask(prompt, MAX_TOKENS, f"frozen {id(clients)} {attempt} {i}"))
            for i, prompt in enumerate(long)
        ]
        frozen = await workers.look("prefill-0")
        for _ in range(100):
            if await held_for(workers, frozen, "streaming"):
                os.kill(frozen["pid"], signal.SIGSTOP)
                await workers.settle("prefill-0", frozen)
                if await held_for(workers, frozen, *WITHIN):
                    return frozen, requests
                os.kill(frozen["pid"], signal.SIGCONT)
                break
            await asyncio.sleep(0.01)
        await asyncio.gather(*requests)
    raise AssertionError(f"{TRIES} times nothing was under way")


async def held_for(workers, peer, *states):
    """Destinations that decode workers keep for a peer's attempts in one of these states."""
    reports = [await workers.look(name) for name in workers.names if name.startswith("decode")]
    attempts = [a for one in reports for a in one["attempts"] if a["peer"] == peer["incarnation"]]
    return sum(a["blocks"] for a in attempts if a["state"] in states)


async def num_quarantines(workers):
    """Total on decode workers, without asking a frozen one."""
    return sum([(await workers.look(name))["num_quarantined"] for name in workers.names if name.startswith("decode")])


async def shown(workers):
    """Quarantined blocks in /metrics: by the engines, and by the fabrics."""
    figure = workers.cluster.figure
    return (
        await figure("tandem_worker_kv_blocks", state="quarantined"),
        await figure("tandem_worker_transfer_blocks", state="quarantined"),
    )


@pytest.mark.parametrize("ending", [signal.SIGCONT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
async def test_writer_frozen_mid_transfer_corrupts_nothing(workers, prompts, ending):
    clients, cluster = Clients(workers.cluster, prompts, seed=SEED), workers.cluster
    before, old_pid = await num_quarantines(workers), cluster.pid("prefill-0")
    frozen, requests = await freeze_a_writer(workers, clients, prompts)
    try:
        assert set(await asyncio.gather(*requests)) == {RIGHT}, "the answer goes on elsewhere"
        if transport(workers) == "tcp":
            # The receiver takes payload in itself: revoking is proof, and nothing has to wait for the frozen peer.
            assert await num_quarantines(workers) == before
            assert not await held_for(workers, frozen, *WITHIN, "aborting", "quarantined")
        else:

            async def is_shown():
                return all(await shown(workers))

            await cluster.until(is_shown)
            held = await held_for(workers, frozen, "quarantined")
            # More than the whole pool is used meanwhile; nobody is given a block in quarantine.
            salts = (f"meanwhile {id(clients)} {i}" for i in count())
            outcomes = await asyncio.gather(*(clients.ask(p, MAX_TOKENS, next(salts)) for p in prompts * 2))
            assert set(outcomes) == {RIGHT}
            assert await held_for(workers, frozen, "quarantined") == held > 0
            assert (await shown(workers))[1] == held
            for name in ("decode-0", "decode-1"):
                await workers.look(name, audit=True)
    finally:
        os.kill(frozen["pid"], ending)
    if ending is signal.SIGKILL:
        await workers.come_back("prefill-0", old_pid)
    await cluster.until_idle()
    assert await workers.leftovers() == []
    assert await shown(workers) == (0, 0)
