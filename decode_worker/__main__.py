"""`python -m decode_worker --config FILE --index I`: one decode worker, from its configuration to its drain."""

import asyncio
import logging
import sys
import time
from contextlib import AsyncExitStack, suppress

from decode_worker.config import engine_spec, transfer_settings
from decode_worker.worker import DecodeWorker
from engine.assembly import EngineParts, assemble
from engine.host import EngineHost
from kv_transfer.peer import LocalWorker
from kv_transfer.receiver_hub import ReceiverHub
from kv_transfer.receiver_link import Dialer
from kv_transfer.region import KVRegion
from kv_transfer.transports.catalogue import open_receivers
from kv_transfer.transports.shared_pool import SharedPool
from tandem.config import ClusterConfig
from tandem.ids import WorkerId
from tandem.model_path import model_name
from tandem.process import Lifetime, announce, worker_main
from tandem.roles import WorkerRole
from tandem.rpc import ClusterAuth, listen, make_server, open_channel
from tandem.v1.session_pb2_grpc import add_WorkerServicer_to_server
from tandem.worker_config import cluster_secret, listen_address
from tandem.worker_identity import WorkerIdentity, draw_incarnation
from tandem.worker_session import WorkerSessions

_log = logging.getLogger(__name__)


async def serve(config: ClusterConfig, index: int, ready_fd: int | None, lifetime: Lifetime) -> None:
    """Load, serve until told to stop, drain. What is entered last leaves first."""
    started_s = time.monotonic()
    host_name, port = listen_address(config.decode, "decode", index)
    auth = ClusterAuth(cluster_secret(config))
    parts = await asyncio.to_thread(assemble, engine_spec(config), pool=SharedPool)
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        server = make_server(auth)
        bound = listen(server, host_name, port)
        identity = WorkerIdentity(
            worker_id=WorkerId(f"decode-{index}"),
            incarnation=draw_incarnation(),
            role=WorkerRole.DECODE,
            model_name=model_name(config.model.path, config.model.name),
            address=f"{host_name}:{bound}",
        )
        host = EngineHost(parts, on_fatal=lifetime.fail)
        worker = DecodeWorker(identity, host, tasks)
        sessions = WorkerSessions(worker)
        host.start(on_output=worker.on_output, ports=lambda: sessions.ports)
        stack.push_async_callback(host.stop)
        await _with_handoffs(stack, worker, parts, config)
        add_WorkerServicer_to_server(sessions, server)  # type: ignore[no-untyped-call]
        await server.start()
        stack.push_async_callback(server.stop, 0.5)
        stack.callback(sessions.finish)
        loads = tasks.create_task(sessions.tell_load())
        stack.callback(loads.cancel)
        announce(ready_fd, {**identity.facts(), **parts.facts(), "load_s": round(time.monotonic() - started_s, 3)})
        _log.info("decode worker %s serves at %s", identity.worker_id, identity.address)
        await lifetime.wait()
        sessions.drain("the worker was told to stop")
        with suppress(TimeoutError):
            async with asyncio.timeout(config.decode.drain_s):
                await worker.drain()


async def _with_handoffs(
    stack: AsyncExitStack, worker: DecodeWorker, parts: EngineParts, config: ClusterConfig
) -> None:
    """Let prompts be computed elsewhere, where the KV pool is host memory that peers can reach."""
    memory = parts.kv_memory()
    if memory is None or parts.pool is None:
        return
    stack.callback(parts.pool.close)
    region = KVRegion.of(memory, parts.layout, fd=parts.pool.fd)
    # Bytes come in where orders do: whoever can reach this worker can reach both.
    kv_host = worker.identity.address.rpartition(":")[0].strip("[]")
    transfer = config.transfer
    receivers = open_receivers(
        region, choice=transfer.transport, host=kv_host, isolated_network=transfer.isolated_network
    )
    hub = ReceiverHub(
        LocalWorker(
            worker_id=worker.identity.worker_id,
            incarnation=worker.identity.incarnation,
            region=region,
        ),
        owner=worker.handoffs,
        receivers=receivers,
        dialer=Dialer(open_channel=open_channel, metadata=ClusterAuth(cluster_secret(config)).client_metadata()),
        settings=transfer_settings(config),
    )
    worker.use(await stack.enter_async_context(hub), tuple(receiver.name for receiver in receivers))


if __name__ == "__main__":
    sys.exit(worker_main(WorkerRole.DECODE, serve))
