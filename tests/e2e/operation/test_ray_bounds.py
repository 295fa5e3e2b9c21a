"""Time bounds of `tandem up --ray`, by what a process gets of the machine meanwhile; and silent nodes."""

import asyncio
import json
from time import monotonic

import psutil
import pytest
import pytest_asyncio

from tests.support.e2e.ray_nodes import ray_nodes
from tests.support.e2e.ray_up import (
    ANSWER,
    STREAMS,
    Upped,
    assert_same_tokens,
    continuous_requests,
    endpoints_of,
    lose_a_node,
    measure_slowdown,
    running_on,
    tandem,
)
from tests.support.running_cluster import WAIT_S

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]
JOIN_S, PAUSE_S, REPLACE_S = 10.0, 10.0, 20.0
"""For as long as a process gets all the time it wants."""
SILENCE_S = 8.0
"""Default of `ray.silence_s`."""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def nodes():
    async with ray_nodes() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def upped(nodes, tmp_path_factory):
    async with running_on(nodes, tmp_path_factory.mktemp("ray")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(upped):
    async with endpoints_of(upped) as made:
        yield made


@pytest.fixture(scope="module")
def answers(oracle):
    prompts = [oracle.story(5000 + i, 120) for i in range(STREAMS)]
    return prompts, oracle.batch(prompts, ANSWER)


async def test_ray_lost_node_and_scale_up_stay_within_bounds(nodes, upped, cluster, answers):
    lost = await lose_a_node(nodes.kill_one, upped, cluster, answers)
    print(f"\n{lost}")
    await cluster.until_idle()
    ordered_s = monotonic()
    measuring = asyncio.ensure_future(measure_slowdown())
    await upped.order("scale", "decode=3")
    await cluster.until_workers(4)
    joined_s, slowdown = monotonic() - ordered_s, await measuring
    print(f"joined {joined_s:.1f} s after the order, {slowdown:.1f} s for a second's work")
    await upped.order("scale", "decode=2")
    assert joined_s <= JOIN_S * slowdown
    assert lost.longest_pause_s <= PAUSE_S * lost.slowdown
    assert lost.replaced_s <= REPLACE_S * lost.slowdown


async def test_ray_restart_of_all_processes_loses_no_request(nodes, upped, cluster, answers):
    async with continuous_requests(cluster, answers, clients=4):
        before = await nodes.workers()
        await upped.order("restart")
        after = await nodes.workers()
    assert len(after) == len(before) == 3
    assert not after.keys() & before.keys()
    await cluster.until_workers(3)
    await assert_same_tokens(cluster, answers, "restarted")


async def test_ray_planner_grows_the_late_pool(upped, cluster, answers):
    """Run the planner as a user does; it finds the control socket by the router's port and queries the routers."""
    output = []
    planning = await tandem(
        upped.environment,
        *("autoscale", "--url", f"http://127.0.0.1:{upped.port}", "--json", "--period-s", "0.5", "--start-s", "1"),
        *("--slo", "ttft=0.05,itl=2", "--most", "4", "--hold-s", "600"),
    )

    async def listen():
        async for line in planning.stdout:
            output.append(line.decode())
            if any(json.loads(one).get("outcome") == "done" for one in output[-1:] if one.startswith("{")):
                return

    async with continuous_requests(cluster, answers, clients=4):
        async with asyncio.timeout(3 * WAIT_S):
            await listen()
        await cluster.until_workers(4)
    planning.terminate()
    await planning.communicate()
    await upped.order("scale", "prefill=1", "decode=2")
    await cluster.until_workers(3)
    await assert_same_tokens(cluster, answers, "planned")


async def test_ray_silent_head_blocks_only_what_needs_it(nodes, upped, cluster, answers):
    since = len(upped.logs.lines)
    await nodes.freeze_head()
    pid, name = max((await nodes.workers()).items(), key=lambda one: one[1].startswith("decode"))
    psutil.Process(pid).kill()
    await upped.says(name, "was ended by SIGKILL", since=since)
    (router,) = [child for child in psutil.Process(upped.process.pid).children() if "router" in child.cmdline()]
    router.kill()
    await upped.says("router", "is back", since=since)
    assert not any(name in line and "is back" in line for line in upped.logs.lines[since:]), "it needs the head"
    await nodes.go_on()
    await upped.says(name, "is back", since=since)
    await cluster.until_workers(3)
    await assert_same_tokens(cluster, answers, "the head is back")


async def test_ray_cluster_without_a_fitting_node_waits(nodes, tmp_path):
    config = tmp_path / "cluster.yaml"
    needs = "{cpus: 0.5, resources: {late: 0.5}}"
    config.write_text(f"ray: {{prefill: {needs}, decode: {needs}}}\n")
    environment = nodes.environment | {"XDG_RUNTIME_DIR": str(tmp_path), "TANDEM_ENGINE__NUM_THREADS": "1"}
    sizes = ("--prefill", "1", "--decode", "1", "--port", "0", "--grpc-port", "0")
    process = await tandem(environment, "up", "--ray", nodes.address, "--config", str(config), *sizes)
    made = Upped(process, 0, environment)
    listening = asyncio.ensure_future(made.listen())
    await made.says("waits for a Ray node with 0.5 CPU, 0.5 late free", "and no node is that large")
    await nodes.add_node_with("late")
    await made.says("Try it:")
    process.terminate()
    async with asyncio.timeout(WAIT_S):
        await listening
    assert await process.wait() == 0, made.logs.lines[-40:]


async def test_ray_workers_end_with_killed_command(nodes, tmp_path):
    before = await nodes.workers()
    environment = nodes.environment | {"XDG_RUNTIME_DIR": str(tmp_path), "TANDEM_ENGINE__NUM_THREADS": "1"}
    process = await tandem(
        environment, "up", "--ray", nodes.address, "--port", "0", "--grpc-port", "0", "--prefill", "0"
    )
    made = Upped(process, 0, environment)
    listening = asyncio.ensure_future(made.listen())
    await made.says("Try it:")
    assert len(await nodes.workers()) == len(before) + 1
    process.kill()
    async with asyncio.timeout(WAIT_S):
        await listening
        await process.wait()
        while await nodes.workers() != before:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.05)


async def test_ray_silent_node_is_lost_and_its_workers_end_on_return(tmp_path, answers):
    """No process learns of the loss by a closed connection, nor from Ray for 15 s and more."""
    async with (
        ray_nodes(is_quick=False) as nodes,
        running_on(nodes, tmp_path) as upped,
        endpoints_of(upped) as cluster,
    ):
        stopped = {}

        async def still():
            stopped.update(await nodes.freeze_node())
            return sorted(stopped.values())

        lost = await lose_a_node(still, upped, cluster, answers)
        print(f"\nsilent: {lost}")
        assert any(f"no answer for {SILENCE_S:g} s" in line for line in upped.logs.lines)
        assert lost.longest_pause_s <= PAUSE_S * lost.slowdown
        assert lost.replaced_s <= SILENCE_S + REPLACE_S * lost.slowdown
        await nodes.go_on()
        async with asyncio.timeout(WAIT_S):
            while any(map(psutil.pid_exists, stopped)):  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.05)
        await cluster.until_workers(3)
        await assert_same_tokens(cluster, answers, "back")
