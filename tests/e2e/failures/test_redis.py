"""`tandem up` with Redis: two routers of one YAML, real workers, a real Redis that ends and comes back."""

import pytest
import pytest_asyncio

from cluster.control.operations import carry_out
from cluster.control.wire import RestartRequest, ScaleRequest
from tandem.client.aio import AsyncClient
from tandem.client.options import Options
from tests.e2e.failures.test_router_takeover import second_router
from tests.support.e2e.emitted import is_of_drafts, is_of_files, is_of_planner, unknown, uses_certificate_metrics
from tests.support.monitoring_files import UsedExpression, expressions
from tests.support.redis_server import RedisServer
from tests.support.running_cluster import running

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def server():
    with RedisServer(password="hush-hush") as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(fork_servers, server):
    redis_options = {"redis__url": server.url, "redis__timeout_s": 0.3, "redis__lease_s": 1.0}
    # So that it exports every metric that dashboards use.
    redis_options |= {"engine__host_cache_bytes": 1 << 20, "router__quality__period_s": 3600.0}
    redis_options |= {"router__quality__shadow_share": 1e-9}  # its metrics, of hardly any answer
    async with running(command=fork_servers.command, **redis_options) as made:
        yield made


def prompt(oracle, number):
    return oracle.story(number, 160)


async def until_known(router, blocks):
    async def known():
        return await router.figure("tandem_prefix_map_blocks") >= blocks

    await router.until(known)


async def until_states_written(router):
    """Wait until both workers have, by their reports to the router, which follow the writes."""

    async def written():
        return await router.figure("tandem_worker_redis_states_total") >= 4

    await router.until(written)


async def test_routers_share_prefixes_through_redis_outages(cluster, server, oracle):
    async with second_router(cluster) as replica:
        prompts = [prompt(oracle, number) for number in range(4)]
        expected = [oracle.tokens(ids, 6) for ids in prompts]
        assert await cluster.tokens(prompts[0], 6) == expected[0]
        await until_known(replica, 10)
        assert await replica.figure("tandem_redis_followed_workers") == 2
        again = await replica.complete(prompts[0], 6)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 144

        async def has_peer():
            return await replica.figure("tandem_redis_peer_routers") == 1

        await replica.until(has_peer)
        server.kill()
        for router, ids, tokens in ((cluster, prompts[1], expected[1]), (replica, prompts[2], expected[2])):
            assert await router.tokens(ids, 6) == tokens
        server.start()
        assert await replica.tokens(prompts[3], 6) == expected[3]

        async def all_up():
            ups = [await router.figures("tandem_redis_up") for router in (cluster, replica)]
            ups.append(await cluster.figures("tandem_worker_redis_up"))
            return all(values and all(values.values()) for values in ups)

        await cluster.until(all_up)
        for router in (cluster, replica):
            await until_known(router, 40)
            assert await router.figure("tandem_redis_bad_entries_total") == 0
            await until_states_written(router)
    assert not [line for line in cluster.logs.lines if "hush" in line]
    assert [line for line in cluster.logs.lines if "fails (publish)" in line]


@pytest.mark.slow
async def test_worker_in_file_and_redis_counts_once(cluster, oracle):
    """`tandem restart` has the routers reload the file (SIGHUP) while Redis lists the same workers."""
    for change in (
        RestartRequest(roles=("prefill", "decode", "router")),
        ScaleRequest(decode=2),
        ScaleRequest(decode=1),
    ):
        await carry_out(cluster.local, change, cluster.logs.lines.append)
        await cluster.until_workers(len(cluster.local.workers))
        await followed(cluster, len(cluster.local.workers))
        assert await cluster.tokens(prompt(oracle, 9), 6) == oracle.tokens(prompt(oracle, 9), 6)


async def followed(cluster, count):
    """Wait until so many workers' logs are followed: each once, and no departed one."""

    async def are_all():
        return await cluster.figure("tandem_redis_followed_workers") == count

    await cluster.until(are_all)


async def test_dashboards_and_alerts_use_exported_metrics(cluster, oracle):
    """Metrics, labels and label values in every panel and rule."""
    await cluster.stream(prompt(oracle, 7), 6)
    await cluster.tokens(prompt(oracle, 8)[:32], 2)
    await cluster.tokens(prompt(oracle, 7), 6, ignore_eos=False, structured_outputs={"choice": ["yes", "no"]})
    async with AsyncClient(cluster.local.grpc_address) as client:
        await client.generate(prompt(oracle, 7), Options(max_tokens=2))

    async def read_by_both():
        return len(await cluster.figures("tandem_quality_loss_nats")) == 2

    await cluster.until(read_by_both)
    # The others' are compared where there is what they are of: test_autoscale.py, test_access_control.py,
    # test_cluster_tls.py, test_speculation.py.
    elsewhere = (is_of_planner, is_of_files, is_of_drafts, uses_certificate_metrics)
    used = [one for one in expressions() if not any(is_of(one) for is_of in elsewhere)]
    exposition = (await cluster.http.get("/metrics")).text
    assert unknown(used, exposition) == []
    misspelt = [
        UsedExpression("x", one)
        for one in ("sum by (rle) (tandem_ready)", 'tandem_workers{role="cook"}', "tandem_redy")
    ]
    assert len(unknown(misspelt, exposition)) == len(misspelt)
