"""A cluster's control socket as a scaler, against a real socket that speaks its wire."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.autoscaler.local_scaler import ControlScaler
from cluster.control.wire import (
    ControlReply,
    ControlRequest,
    FlipRequest,
    MalformedRequest,
    ProcessStatus,
    ScaleRequest,
    StatusRequest,
    encode_message,
    parse_request,
)
from cluster.planner.orders import Order, OrderFailed
from cluster.planner.values import Action, ActionKind, Sizes
from cluster.supervisor.supervisor import ProcessState
from tandem.values.roles import WorkerRole


@dataclass
class Cluster:
    """Records requests, and sends scripted answers."""

    path: Path
    states: list[tuple[str, ProcessState]] = field(default_factory=list)
    changing: bool = False
    refusal: str | None = None
    received_requests: list[ControlRequest] = field(default_factory=list)
    hang: bool = False
    silent: asyncio.Event | None = None
    """Until it is set nothing is said at all."""
    is_old: bool = False
    """Of a version that knows no orders that yield."""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        if self.is_old and b"yields" in line:
            with pytest.raises(MalformedRequest) as caught:
                parse_request(line.replace(b"yields", b"unheard_of"))
            writer.write(
                encode_message(ControlReply(done=False, reason=str(caught.value).replace("unheard_of", "yields")))
            )
            writer.close()
            return
        request = parse_request(line)
        self.received_requests.append(request)
        if self.silent is not None:
            await self.silent.wait()
        lines = [ControlReply(progress="prefill-1 serves")]
        if isinstance(request, StatusRequest):
            lines = [ControlReply(processes=self._processes(), changing=self.changing)]
        if not self.hang:
            lines.append(ControlReply(done=self.refusal is None, reason=self.refusal))
        for line in lines:
            writer.write(encode_message(line))
        writer.close()

    def _processes(self) -> tuple[ProcessStatus, ...]:
        return tuple(
            ProcessStatus(name=f"{role}-{n}", role=role, state=state.value, pid=None, address="")
            for n, (role, state) in enumerate(self.states)
        )


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    running = Cluster(folder / "c.sock")
    async with await asyncio.start_unix_server(running.answer, running.path):
        yield running


def order(*actions: tuple[ActionKind, WorkerRole]) -> Order:
    before = Sizes(prefill=1, decode=3)
    return Order.from_actions(tuple(Action(kind=kind, role=role) for kind, role in actions), before)


async def test_local_scaler_counts_starting_but_not_retiring_workers(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        running.states = [("router", ProcessState.READY), *(("prefill", state) for state in ProcessState)]
        running.states += [("decode", ProcessState.READY), ("decode", ProcessState.RETIRING)]
        view = await ControlScaler(running.path).fleet()
    assert view.sizes == Sizes(prefill=4, decode=1)
    assert view.starting == Sizes(prefill=3, decode=0)


async def test_local_scaler_order_flips_first_then_scales_once(tmp_path: Path) -> None:
    flip, start = (ActionKind.FLIP, WorkerRole.PREFILL), (ActionKind.START, WorkerRole.DECODE)
    flip_request = FlipRequest(to="prefill", yields=True)
    async with cluster(tmp_path) as running:
        await ControlScaler(running.path).carry_out(order(flip, flip, start))
        assert running.received_requests == [flip_request, flip_request, ScaleRequest(prefill=3, decode=2, yields=True)]
        running.received_requests.clear()
        await ControlScaler(running.path).carry_out(order(flip))
        assert running.received_requests == [flip_request]


async def test_local_scaler_omits_new_fields_for_older_parent(tmp_path: Path) -> None:
    """Parents are upgraded last."""
    flip, start = (ActionKind.FLIP, WorkerRole.PREFILL), (ActionKind.START, WorkerRole.DECODE)
    async with cluster(tmp_path) as running:
        running.is_old = True
        await ControlScaler(running.path).carry_out(order(flip, start))
        assert running.received_requests == [FlipRequest(to="prefill"), ScaleRequest(prefill=2, decode=3)]


async def test_local_scaler_cluster_being_changed_has_no_sizes(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        running.changing = True
        with pytest.raises(OrderFailed, match="another change"):
            await ControlScaler(running.path).fleet()


async def test_local_scaler_reports_refusal_verbatim(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        running.refusal = "another change is in progress"
        with pytest.raises(OrderFailed, match="another change is in progress"):
            await ControlScaler(running.path).carry_out(order((ActionKind.FLIP, WorkerRole.PREFILL)))
    assert len(running.received_requests) == 1


async def test_local_scaler_stopped_or_missing_cluster_is_reported(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        running.hang = True
        with pytest.raises(OrderFailed, match="stopped before"):
            await ControlScaler(running.path).carry_out(order((ActionKind.STOP, WorkerRole.DECODE)))
    with pytest.raises(OrderFailed, match="no cluster answers"):
        await ControlScaler(tmp_path / "nobody.sock").fleet()


async def test_local_scaler_silent_cluster_times_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.autoscaler.local_scaler._ANSWER_S", 0.05)
    async with cluster(tmp_path) as running:
        running.silent = asyncio.Event()
        with pytest.raises(OrderFailed, match="has not answered"):
            await ControlScaler(running.path).fleet()
        running.silent.set()
