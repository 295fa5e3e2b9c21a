"""`python -m prefill_worker --config FILE --index I`: one prefill worker, from its configuration to its drain."""

import asyncio
import logging
import sys
import time
from contextlib import AsyncExitStack, suppress

from engine.assembly import assemble
from engine.host import EngineHost
from kv_transfer.peer import LocalWorker
from kv_transfer.region import KVRegion
from kv_transfer.sender_hub import SenderHub
from kv_transfer.transports.catalogue import open_senders
from kv_transfer.transports.shared_pool import SharedPool
from prefill_worker.config import engine_spec, transfer_settings
from prefill_worker.worker import PrefillWorker
from tandem.config import ClusterConfig
from tandem.errors import ConfigError
from tandem.ids import WorkerId
from tandem.model_path import model_name
from tandem.process import Lifetime, announce, worker_main
from tandem.roles import WorkerRole
from tandem.rpc import ClusterAuth, listen, make_server
from tandem.v1.session_pb2_grpc import add_WorkerServicer_to_server
from tandem.worker_config import cluster_secret, listen_address
from tandem.worker_identity import WorkerIdentity, draw_incarnation
from tandem.worker_session import WorkerSessions

_log = logging.getLogger(__name__)


async def serve(config: ClusterConfig, index: int, ready_fd: int | None, lifetime: Lifetime) -> None:
    """Load, serve until told to stop, drain. What is entered last leaves first."""
    started_s = time.monotonic()
    host_name, port = listen_address(config.prefill, "prefill", index)
    auth = ClusterAuth(cluster_secret(config))
    # One rank's pool may lie anywhere; several ranks share theirs, so that this process can send all of it.
    pool = SharedPool if config.prefill.tensor_parallel_size > 1 else None
    parts = await asyncio.to_thread(assemble, engine_spec(config), pool=pool)
    memory = parts.kv_memory()
    if memory is None:
        raise ConfigError("engine.device: hand-offs from CUDA memory are not built yet; a prefill worker runs on cpu")
    region = KVRegion.of(memory, parts.layout)
    transfer = config.transfer
    senders = open_senders(region, choice=transfer.transport, isolated_network=transfer.isolated_network)
    async with AsyncExitStack() as stack:
        if parts.pool is not None:
            stack.callback(parts.pool.close)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        server = make_server(auth)
        bound = listen(server, host_name, port)
        identity = WorkerIdentity(
            worker_id=WorkerId(f"prefill-{index}"),
            incarnation=draw_incarnation(),
            role=WorkerRole.PREFILL,
            model_name=model_name(config.model.path, config.model.name),
            address=f"{host_name}:{bound}",
        )
        host = EngineHost(parts, on_fatal=lifetime.fail)
        worker = PrefillWorker(identity, host, tuple(sender.name for sender in senders))
        sessions = WorkerSessions(worker)
        host.start(on_output=worker.on_output, on_layers=worker.on_layers, ports=lambda: sessions.ports)
        stack.push_async_callback(host.stop)
        local = LocalWorker(worker_id=identity.worker_id, incarnation=identity.incarnation, region=region)
        hub = SenderHub(local, owner=worker, senders=senders, settings=transfer_settings(config))
        worker.hub = await stack.enter_async_context(hub)
        hub.register(server)
        add_WorkerServicer_to_server(sessions, server)  # type: ignore[no-untyped-call]
        await server.start()
        stack.push_async_callback(server.stop, 0.5)
        stack.callback(sessions.finish)
        loads = tasks.create_task(sessions.tell_load())
        stack.callback(loads.cancel)
        announce(ready_fd, {**identity.facts(), **parts.facts(), "load_s": round(time.monotonic() - started_s, 3)})
        _log.info("prefill worker %s serves at %s", identity.worker_id, identity.address)
        await lifetime.wait()
        sessions.drain("the worker was told to stop")
        with suppress(TimeoutError):
            async with asyncio.timeout(config.prefill.drain_s):
                await worker.drain()


if __name__ == "__main__":
    sys.exit(worker_main(WorkerRole.PREFILL, serve))
