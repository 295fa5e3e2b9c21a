"""A prefill and a decode worker in one process, joined by the `memory` transport: `python -m tandem_bench.memory_pair`.

The workers, hubs, sessions and gRPC servers are the real ones; only the process boundary between the pools is missing.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import grpc.aio

from decode_worker.worker import DecodeWorker
from engine.assembly import EngineParts, assemble
from kv_transfer.memory.region import KVRegion
from kv_transfer.session.receiver_attempt import ReceiverOwner
from kv_transfer.transports.in_process import NAME, MemoryFabric
from prefill_worker.worker import PrefillWorker
from tandem.config.cluster import ClusterConfig
from tandem.config.worker import cluster_secret, listen_address
from tandem.errors import ConfigError
from tandem.model_path import model_name
from tandem.process.lifetime import Lifetime, WorkerPlace, announce, end, worker_main
from tandem.rpc.cluster_grpc import ClusterAuth, listen, make_server
from tandem.v1.session_pb2_grpc import add_WorkerServicer_to_server
from tandem.values.ids import WorkerId
from tandem.values.roles import WorkerRole
from tandem.values.worker_identity import WorkerIdentity, draw_incarnation
from worker.engine_host import EngineHost
from worker.engine_spec import engine_spec
from worker.kv_exchange.config import transfer_settings
from worker.kv_exchange.owners import PromptOwner
from worker.kv_exchange.service import FabricPlan, open_fabric
from worker.sessions import WorkerSessions


@dataclass(slots=True, kw_only=True)
class Pair:
    """State that both workers share; entered on `stack`, which ends them."""

    config: ClusterConfig
    lifetime: Lifetime
    stack: AsyncExitStack
    tasks: asyncio.TaskGroup
    auth: ClusterAuth
    fabric: MemoryFabric = field(default_factory=MemoryFabric)

    async def start_prefill(self) -> None:
        parts, identity, server = await self._open(WorkerRole.PREFILL)
        host = EngineHost(parts, on_fatal=self.lifetime.fail)
        worker = PrefillWorker(identity, host)
        sessions = WorkerSessions(worker)
        host.start(on_output=worker.on_output, on_layers=worker.on_layers, ports=lambda: sessions.ports)
        self.stack.push_async_callback(host.stop)
        worker.fabric = await open_fabric(self.stack, server, self._plan(identity, host, prompts=worker))
        await self._serve(server, sessions)

    async def start_decode(self) -> None:
        parts, identity, server = await self._open(WorkerRole.DECODE)
        host = EngineHost(parts, on_fatal=self.lifetime.fail)
        worker = DecodeWorker(identity, host, self.tasks)
        sessions = WorkerSessions(worker)
        host.start(on_output=worker.on_output, ports=lambda: sessions.ports)
        self.stack.push_async_callback(host.stop)
        worker.use(await open_fabric(self.stack, server, self._plan(identity, host, handoffs=worker.handoffs)))
        await self._serve(server, sessions)

    def _plan(
        self,
        identity: WorkerIdentity,
        host: EngineHost,
        *,
        prompts: PromptOwner | None = None,
        handoffs: ReceiverOwner | None = None,
    ) -> FabricPlan:
        memory = host.parts.runner.kv_cache.host_view()
        if memory is None:
            raise ConfigError("engine.device: the memory transport moves host memory; use cpu")
        return FabricPlan(
            identity=identity,
            host=host,
            region=KVRegion.from_buffer(memory, host.parts.layout),
            transport=NAME,
            settings=transfer_settings(self.config.transfer),
            auth=self.auth,
            spawn=self.tasks.create_task,
            prompts=prompts,
            handoffs=handoffs,
            in_process=self.fabric,
        )

    async def _open(self, role: WorkerRole) -> tuple[EngineParts, WorkerIdentity, grpc.aio.Server]:
        parts = await asyncio.to_thread(assemble, engine_spec(self.config, WorkerRole.DECODE))
        pool = self.config.prefill if role is WorkerRole.PREFILL else self.config.decode
        host, port = listen_address(pool, role.value, 0)
        server = make_server(self.auth)
        identity = WorkerIdentity(
            worker_id=WorkerId(f"{role.value}-0"),
            incarnation=draw_incarnation(),
            role=role,
            model_name=model_name(self.config.model.path, self.config.model.name),
            address=f"{host}:{listen(server, host, port)}",
        )
        return parts, identity, server

    async def _serve(self, server: grpc.aio.Server, sessions: WorkerSessions) -> None:
        add_WorkerServicer_to_server(sessions, server)  # type: ignore[no-untyped-call]
        await server.start()
        self.stack.push_async_callback(server.stop, 0.5)
        self.stack.callback(sessions.finish)
        self.stack.callback(self.tasks.create_task(sessions.send_loads()).cancel)


async def serve(config: ClusterConfig, place: WorkerPlace, lifetime: Lifetime) -> None:
    """Run both workers until stopped."""
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        auth = ClusterAuth(cluster_secret(config))
        pair = Pair(config=config, lifetime=lifetime, stack=stack, tasks=tasks, auth=auth)
        await pair.start_prefill()
        await pair.start_decode()
        announce(place.ready_fd, {"transport": NAME})
        await lifetime.wait()


if __name__ == "__main__":
    end(worker_main(WorkerRole.DECODE, serve))
