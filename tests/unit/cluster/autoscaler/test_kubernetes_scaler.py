"""Pools as StatefulSets, against a server that speaks the API's part over TLS."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.autoscaler.kubernetes_scaler import KubernetesScaler
from cluster.planner.orders import Order, OrderFailed
from cluster.planner.values import Action, ActionKind, Sizes
from tandem.values.roles import WorkerRole
from tests.support.certificates import Authority
from tests.support.cluster.api_server import ApiServer, api_server

SETS = {WorkerRole.PREFILL: "chat-prefill", WorkerRole.DECODE: "chat-decode"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with api_server(tmp_path) as running:
        yield running


def scaler(server: ApiServer) -> KubernetesScaler:
    return KubernetesScaler(SETS, account=server.account, api=server.url)


def order(before: Sizes, *actions: tuple[ActionKind, WorkerRole]) -> Order:
    return Order.from_actions(tuple(Action(kind=kind, role=role) for kind, role in actions), before)


GROW = order(Sizes(prefill=1, decode=2), (ActionKind.START, WorkerRole.PREFILL))
BOTH = order(Sizes(prefill=1, decode=2), (ActionKind.STOP, WorkerRole.DECODE), (ActionKind.START, WorkerRole.PREFILL))


async def test_kubernetes_scaler_order_grows_before_shrinking(server: ApiServer) -> None:
    ours = scaler(server)
    assert (await ours.fleet()).sizes == Sizes(prefill=1, decode=2)
    await ours.carry_out(BOTH)
    assert server.replicas == {"chat-prefill": 2, "chat-decode": 1}
    patched = [path.split("/")[-2] for method, path in server.requests if method == "PATCH"]
    assert patched == ["chat-prefill", "chat-decode"]


async def test_kubernetes_scaler_unchanged_pool_is_not_touched(server: ApiServer) -> None:
    await scaler(server).carry_out(GROW)
    assert all("chat-prefill" in path for _, path in server.requests)


async def test_kubernetes_scaler_reads_empty_pool(server: ApiServer) -> None:
    server.replicas["chat-prefill"] = 0
    assert (await scaler(server).fleet()).sizes == Sizes(prefill=0, decode=2)


async def test_kubernetes_scaler_rereads_renewed_token(server: ApiServer) -> None:
    ours = scaler(server)
    await ours.fleet()
    server.token = "second"
    with pytest.raises(OrderFailed, match="401 Unauthorized"):
        await ours.fleet()
    (server.account / "token").write_text("second")
    await ours.fleet()


async def test_kubernetes_scaler_concurrent_scaling_wins(server: ApiServer) -> None:
    server.replicas["chat-prefill"] = 4
    with pytest.raises(OrderFailed, match="scaled by something else"):
        await scaler(server).carry_out(GROW)
    assert server.replicas["chat-prefill"] == 4


async def test_kubernetes_scaler_conflicting_patch_is_refused(server: ApiServer) -> None:
    server.moves_after_get = "chat-prefill"
    with pytest.raises(OrderFailed, match="409 the object has been modified"):
        await scaler(server).carry_out(GROW)
    assert server.replicas["chat-prefill"] == 1


async def test_kubernetes_scaler_missing_permission_is_reported(server: ApiServer) -> None:
    server.allowed = {"GET"}
    with pytest.raises(OrderFailed, match=r"chat-prefill: 403 .*forbidden"):
        await scaler(server).carry_out(GROW)


async def test_kubernetes_scaler_untrusted_server_never_gets_the_token(server: ApiServer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (server.account / "ca.crt").write_bytes(Authority().issue(other).ca.read_bytes())
    with pytest.raises(OrderFailed, match="does not answer"):
        await scaler(server).fleet()
    assert server.requests == []


@pytest.mark.parametrize("token", ["hush\nhush", "hush\u00e9"])
async def test_kubernetes_scaler_malformed_token_is_reported_without_its_text(server: ApiServer, token: str) -> None:
    (server.account / "token").write_text(token)
    with pytest.raises(OrderFailed, match="is not a token") as caught:
        await scaler(server).fleet()
    assert "hush" not in str(caught.value)


async def test_kubernetes_scaler_malformed_scale_is_refused(server: ApiServer) -> None:
    version = b'"metadata": {"resourceVersion": "1"}'
    many = [
        b'{"spec": {"replicas": %s}, %s}' % (replicas, version) for replicas in (b"Infinity", b"NaN", b"-1", b'"x"')
    ]
    for answer in (b"[]", b"<html>", b'{"spec": {}}', b'{"spec": [], %s}' % version, *many):
        server.answer = answer
        with pytest.raises(OrderFailed, match="not return a valid Scale"):
            await scaler(server).fleet()


async def test_kubernetes_scaler_missing_service_account_is_reported(server: ApiServer) -> None:
    (server.account / "token").unlink()
    with pytest.raises(OrderFailed, match="service account"):
        await scaler(server).fleet()
