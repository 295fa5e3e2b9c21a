"""`python -m router --config FILE`: the front doors, from the configuration to the drain."""

import asyncio
import gc
import logging
import socket
import sys
import time
from contextlib import AsyncExitStack
from random import SystemRandom

from router.admission import Admission
from router.canary import CANARY_SALT, Canary
from router.choice_run import DispatchSettings
from router.dispatch import Dispatcher
from router.fleet import WorkerFleet
from router.frontend import Frontend, ModelInfo
from router.grpc.server import GrpcDoor, build_server
from router.http.app import create_app
from router.http.server import HttpDoor
from router.metrics import RouterMetrics
from router.placement import CostModel
from router.placer import Placer
from router.prefix_map import PrefixMap
from router.readiness import Readiness, first_worker
from router.session import SessionSettings
from router.tokenizer import Tokenizer
from router.workers import WorkerRegistry
from tandem.block_hash import BlockHasher
from tandem.config import ClusterConfig
from tandem.errors import ConfigError
from tandem.hosts import join, reachable
from tandem.model_path import model_directory
from tandem.process import Lifetime, announce, router_main
from tandem.registry import StaticDirectory
from tandem.rpc import ClusterAuth, open_channel
from tandem.telemetry import open_tracer
from tandem.worker_config import cluster_secret
from tandem.worker_identity import draw_incarnation

_log = logging.getLogger(__name__)


async def serve(config: ClusterConfig, ready_fd: int | None, lifetime: Lifetime) -> None:
    """Join the workers, open the doors, serve until told to stop, drain. What is entered last leaves first."""
    secret = cluster_secret(config)
    tokenizer = await asyncio.to_thread(Tokenizer.load, model_directory(config.model.path))
    registry = WorkerRegistry(prefix_map=PrefixMap(), clock=time.monotonic)
    fleet = WorkerFleet(
        directory=StaticDirectory(prefill=config.prefill.addresses, decode=config.decode.addresses),
        listener=registry,
        channel_factory=open_channel,
        rng=SystemRandom(),
        settings=SessionSettings(
            metadata=ClusterAuth(secret).client_metadata(),
            incarnation=draw_incarnation(),
            silence_s=config.router.worker_silence_s,
        ),
    )
    async with AsyncExitStack() as stack:
        tracer = open_tracer(
            stack, config.telemetry, service="tandem-router", instance=f"router.{socket.gethostname()}"
        )
        await stack.enter_async_context(fleet)
        if not await first_worker(registry, lifetime):
            return
        model = _model_info(registry)
        if tokenizer.size > model.vocab_size:
            raise ConfigError(f"the tokenizer has {tokenizer.size} tokens, the model embeds {model.vocab_size}")
        metrics = RouterMetrics(model.name)
        dispatcher = make_dispatcher(config, registry, metrics, secret)
        frontend = Frontend(model=model, tokenizer=tokenizer, config=config.router, secret=secret, tracer=tracer)
        canary = Canary(registry, dispatcher, hash_root=frontend.hash_root(CANARY_SALT))
        readiness = Readiness(registry, metrics, canary.answering)
        app = create_app(frontend, dispatcher, readiness, config.router, metrics)
        server = build_server(frontend, dispatcher, config.router, metrics)
        where, drain_s = config.router.host, config.decode.drain_s
        http = await stack.enter_async_context(HttpDoor(app, host=where, port=config.router.port, grace_s=drain_s))
        door = GrpcDoor(server, host=where, port=config.router.grpc_port, grace_s=drain_s)
        rpc = await stack.enter_async_context(door)
        await rpc.set_serving(True)
        await stack.enter_async_context(canary)
        shown = reachable(where)
        # What was made until now lives as long as the process: collections need not look at it.
        gc.freeze()
        announce(ready_fd, {"http": f"http://{join(shown, http.port)}", "grpc": join(shown, rpc.port)})
        _log.info("router serves HTTP on %s:%d and gRPC on %s:%d", where, http.port, where, rpc.port)
        await lifetime.wait()
        readiness.drain()
        await canary.stop()
        await drain(dispatcher, http, rpc, drain_s=drain_s)


def make_dispatcher(
    config: ClusterConfig, registry: WorkerRegistry, metrics: RouterMetrics, secret: bytes
) -> Dispatcher:
    """The core of the router over its live workers."""
    settings = config.router
    placer = Placer(
        registry=registry,
        model=CostModel(local_prefill_tokens=settings.local_prefill_tokens),
        rng=SystemRandom(),
        clock=time.monotonic,
    )
    return Dispatcher(
        placer=placer,
        admission=Admission(max_inflight=settings.max_inflight_requests, clock=time.monotonic),
        hasher=BlockHasher(secret),
        clock=time.monotonic,
        rng=SystemRandom(),
        observer=metrics,
        settings=DispatchSettings(
            max_attempts=settings.max_attempts, stream_buffer_tokens=settings.stream_buffer_tokens
        ),
    )


def _model_info(registry: WorkerRegistry) -> ModelInfo:
    status = registry.status()
    infos = [snapshot.info for snapshot in status.workers]
    return ModelInfo(
        name=infos[0].model_name,
        fingerprint=infos[0].layout.model_fingerprint,
        max_model_len=min(info.max_model_len for info in infos),
        vocab_size=infos[0].vocab_size,
        eos_token_ids=infos[0].eos_token_ids,
        created_s=int(time.time()),
    )


async def drain(dispatcher: Dispatcher, http: HttpDoor, rpc: GrpcDoor, *, drain_s: float) -> None:
    """Refuse what is new at both doors, let what was accepted end, close both: all within one bound.

    The doors listen until then, so that a client is told to go elsewhere rather than find nobody.
    """
    ends_s = time.monotonic() + drain_s
    await rpc.set_serving(False)
    await dispatcher.drain(most_s=drain_s)
    left_s = max(0.0, ends_s - time.monotonic())
    async with asyncio.TaskGroup() as closing:
        closing.create_task(http.stop(left_s))
        closing.create_task(rpc.stop(left_s))


if __name__ == "__main__":
    sys.exit(router_main(serve))
