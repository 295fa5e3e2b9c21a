"""`tandem up --ray` on a Ray cluster of several nodes that asks for a token: a node dies, the cluster is changed.

Streams go on, token for token, and their clients notice nothing but a pause.
"""

from time import monotonic

import pytest
import pytest_asyncio

from tests.support.e2e.ray_nodes import ray_nodes
from tests.support.e2e.ray_up import (
    ANSWER,
    SECRET,
    STREAMS,
    assert_same_tokens,
    continuous_requests,
    endpoints_of,
    lose_a_node,
    running_on,
    tandem,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


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


@pytest.mark.turn(3)
async def test_ray_node_dying_under_streams_loses_none(nodes, upped, cluster, answers):
    print(f"\n{await lose_a_node(nodes.kill_one, upped, cluster, answers)}")
    await assert_same_tokens(cluster, answers, "again")
    await cluster.until_idle()


@pytest.mark.turn(3)
async def test_ray_scale_up_adds_workers(upped, cluster, answers):
    ordered_s = monotonic()
    await upped.order("scale", "decode=3")
    await cluster.until_workers(4)
    print(f"\njoined {monotonic() - ordered_s:.1f} s after the order")
    await assert_same_tokens(cluster, answers, "grown")


@pytest.mark.turn(3)
async def test_ray_flip_and_scale_down_lose_no_request(nodes, upped, cluster, answers):
    """Restarts take the same steps; `test_ray_bounds` tests them."""
    before = await nodes.workers()
    async with continuous_requests(cluster, answers, clients=1):
        await upped.order("flip", "prefill")
        flipped = await nodes.workers()
        await upped.order("scale", "prefill=1")
        after = await nodes.workers()
    assert sorted(before.values()) == ["decode-0", "decode-1", "decode-2", "prefill-0"]
    assert [name for pid, name in before.items() if pid not in flipped] == ["decode-2"]
    assert [name for pid, name in flipped.items() if pid not in before] == ["prefill-1"]
    assert after == {pid: name for pid, name in flipped.items() if name != "prefill-1"}
    await cluster.until_workers(3)
    await assert_same_tokens(cluster, answers, "changed")


@pytest.mark.turn(3)
async def test_ray_session_files_contain_no_secret(nodes, upped):
    """After actors of the cluster have been started, signalled and lost."""
    written = {path: path.read_bytes() for path in nodes.session.rglob("*") if path.is_file()}
    assert any(b"WorkerHost" in content for content in written.values()), "there is something to look at"
    assert [path for path, content in written.items() if SECRET.encode() in content] == []
    assert not any(SECRET in line for line in upped.logs.lines)


@pytest.mark.parametrize(
    ("token", "message"), [("wrong" * 8, "rejected the token"), (None, "no Ray token")], ids=["wrong", "none"]
)
async def test_ray_up_without_valid_token_is_refused(nodes, tmp_path, token, message):
    environment = nodes.environment | {"HOME": str(tmp_path), "RAY_AUTH_TOKEN": token or ""}
    process = await tandem(environment, "up", "--ray", nodes.address, "--port", "0", "--grpc-port", "0")
    out, _ = await process.communicate()
    assert process.returncode == 2, out.decode()
    assert out.decode().startswith("error: "), out.decode()
    assert message in out.decode()
