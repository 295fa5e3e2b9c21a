"""`python -m prefill_worker --config FILE --index I`: one prefill worker, from its configuration to its drain."""

import asyncio
import logging
import time
from contextlib import AsyncExitStack

from engine.assembly import EngineParts
from engine.spec import EngineSpec
from kv_transfer.memory.region import KVRegion
from prefill_worker.worker import PrefillWorker
from tandem.config.cluster import ClusterConfig
from tandem.config.pools import health_port
from tandem.config.worker import cluster_secret, cluster_tls, free_address
from tandem.model_path import model_name
from tandem.process.lifetime import Lifetime, WorkerPlace, announce, end, load_progress, worker_main
from tandem.rpc.cluster_credentials import open_credentials
from tandem.rpc.cluster_grpc import ClusterAuth, ClusterChannels, make_server, open_port, serve_health
from tandem.telemetry.setup import open_tracer
from tandem.values.ids import WorkerId
from tandem.values.roles import WorkerRole
from tandem.values.worker_identity import WorkerIdentity, draw_incarnation
from worker.cluster_state.redis_publisher import make_publisher, publish
from worker.direct_port import open_direct_port
from worker.drain import MigrationSource, leave
from worker.engine_host import EngineHost
from worker.engine_spec import engine_spec
from worker.gpus import take_gpus
from worker.kv_exchange.config import tcp_settings, transfer_settings
from worker.kv_exchange.pool_region import assemble_worker, region_of
from worker.kv_exchange.service import FabricPlan, open_fabric
from worker.node_group import node_group
from worker.quality_check import QualityCheck
from worker.sessions import WorkerSessions
from worker.trace_service import serve_traces

_log = logging.getLogger(__name__)


async def serve(config: ClusterConfig, place: WorkerPlace, lifetime: Lifetime) -> None:
    """Load, serve until stopped, drain. The stack exits in reverse order."""
    started_s = time.monotonic()
    host_name, port = free_address(config.prefill, "prefill", place.index, stated=place.address)
    tls = cluster_tls(config, has_parent=place.ready_fd is not None)
    credentials = open_credentials(tls, (host_name,))
    channels = ClusterChannels(credentials, allows_plaintext=tls.mode == "off")
    auth, tcp = ClusterAuth(cluster_secret(config)), tcp_settings(config.transfer, host_name, credentials)
    nodes = node_group(config, WorkerRole.PREFILL, place.index, host_name, credentials)
    seat, quality = take_gpus(config, WorkerRole.PREFILL, place), QualityCheck.from_config(config, WorkerRole.PREFILL)
    parts = await asyncio.to_thread(_parts, engine_spec(config, WorkerRole.PREFILL, nodes, seat), place.ready_fd)
    async with AsyncExitStack() as stack:
        region = _region(parts, stack)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        server = make_server(auth)
        bound = await open_port(stack, server, host_name, port, credentials)
        direct = await open_direct_port(stack, host_name, credentials)
        identity = _identity(config, place.index, f"{host_name}:{bound}")
        host = EngineHost(parts, on_fatal=lifetime.fail)
        worker = PrefillWorker(identity, host)
        publisher = make_publisher(config.redis, cluster_secret(config), identity)
        sessions = WorkerSessions(worker, publisher, direct)
        worker.migration_source = MigrationSource(host, lambda: sessions.ports)
        host.start(on_output=worker.on_output, on_layers=worker.on_layers, ports=lambda: sessions.event_sinks)
        stack.push_async_callback(host.stop)
        if quality is not None and not await lifetime.unless_stopped(quality.run(host, worker)):
            return
        plan = FabricPlan(
            identity=identity,
            host=host,
            region=region,
            transport=config.transfer.transport,
            isolated_network=config.transfer.isolated_network,
            settings=transfer_settings(config.transfer),
            tcp=tcp,
            auth=auth,
            channels=channels,
            spawn=tasks.create_task,
            rank_links=parts.ranks.region_links,
            prompts=worker,
            tracer=open_tracer(stack, config.telemetry, service="tandem-prefill", instance=identity.worker_id),
        )
        worker.fabric = await open_fabric(stack, server, plan)
        sessions.register(server)
        serve_traces(server, host, config.profiling)
        await server.start()
        stack.push_async_callback(server.stop, 0.5)
        stack.push_async_callback(sessions.end)
        await serve_health(stack, host_name, health_port(config.prefill, place.index), sessions.takes_work)
        stack.callback(tasks.create_task(sessions.send_loads()).cancel)
        await publish(stack, publisher, host)
        announce(place.ready_fd, identity.facts() | parts.facts() | {"load_s": round(time.monotonic() - started_s, 3)})
        _log.info("prefill worker %s is serving at %s", identity.worker_id, identity.address)
        await lifetime.wait()
        sessions.drain("the worker is stopping")
        await leave(worker, drain_s=config.prefill.drain_s, migration_s=config.transfer.succession_s)


def _parts(spec: EngineSpec, ready_fd: int | None) -> EngineParts:
    return assemble_worker(spec, load_progress(ready_fd))


def _identity(config: ClusterConfig, index: int, address: str) -> WorkerIdentity:
    return WorkerIdentity(
        worker_id=WorkerId(f"prefill-{index}"),
        incarnation=draw_incarnation(),
        role=WorkerRole.PREFILL,
        model_name=model_name(config.model.path, config.model.name),
        address=address,
        rack=config.prefill.rack,
    )


def _region(parts: EngineParts, stack: AsyncExitStack) -> KVRegion:
    if parts.pool is not None:
        stack.callback(parts.pool.close)
    return region_of(parts)


if __name__ == "__main__":
    end(worker_main(WorkerRole.PREFILL, serve))
