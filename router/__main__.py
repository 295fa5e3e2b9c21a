"""`python -m router --config FILE`: the router process, from reading the configuration to the drain."""

import asyncio
import gc
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from random import Random, SystemRandom

import grpc.aio
from msgspec.structs import replace
from starlette.types import ASGIApp

from router.access.access_files import AccessControl
from router.access.tls import ServerTlsState
from router.admission.rate_limits import RateLimiter
from router.admission.shared_rate_limits import SharedRateLimits
from router.api.adapters import ServedAdapters
from router.api.frontend import Frontend
from router.api.relevance import completed
from router.api.request.client_request import ModelInfo
from router.api.request.generation_defaults import GenerationDefaults, load_generation_defaults
from router.api.request.named_caches import CachedPrompts, NamedCaches
from router.api.request.shared_named_caches import SharedNamedCaches
from router.api.slow_client import WRITE_TIMEOUT_S
from router.cluster_state.redis_tasks import RouterClusterState
from router.dispatch.choices.context import DispatchSettings
from router.dispatch.dispatcher import Dispatcher
from router.fleet.certificate_watch import CertificateWatch
from router.fleet.configured_workers import ConfiguredPoolSizes, ConfiguredWorkers, configured_addresses
from router.fleet.connections import WorkerFleet
from router.fleet.native_streams import NativeStreams, StreamRoom, native_streams
from router.fleet.probes import CANARY_SALT, QUALITY_SALT, Canary, QualityProbe
from router.fleet.profiles import Profiles
from router.fleet.reachable_workers import ReachableWorkers
from router.fleet.readiness import ReadinessCheck
from router.fleet.shadow_scoring import SHADOW_SALT, ShadowScoring
from router.fleet.worker_session import SessionSettings
from router.grpc.server import GrpcServer, build_server
from router.host_peers.adapters import AdapterFile, identify_once
from router.host_peers.exchange import HostPeerExchange
from router.host_peers.named_caches import NamedCacheExchange
from router.host_peers.rate_limits import RateLimitFile
from router.http.admin.profiles import ProfileRoutes
from router.http.app import OptionalRoutes, create_app
from router.http.server.connection_limits import ConnectionLimits, connection_bounds, raise_file_limit
from router.http.server.http_server import HttpServer
from router.metrics.adapters import AdapterMetrics
from router.metrics.router_metrics import RouterMetrics
from router.placement.decision_log import DecisionLog
from router.placement.placer import Placer
from router.process.admission_setup import cost_model, hedging_settings, make_admission_queue, make_limits
from router.process.batch_setup import open_batches
from router.process.drain import PortTakeover, drain
from router.process.listener_handover import ListenerHandover, RunningRouter, wait_for_workers
from router.process.observability_setup import make_metrics, open_status
from router.sandbox.grammar_check import GrammarProcess
from router.text.tokenizer import Tokenizer
from router.workers.prefix_map import PrefixMap
from router.workers.registry import WorkerRegistry
from tandem.adapters.files import Adapter, read_adapter
from tandem.config.cluster import ClusterConfig, RouterConfig
from tandem.config.engine import ModelSection
from tandem.config.worker import cluster_secret, cluster_tls, max_adapter_bytes, peer_hosts
from tandem.model_path import model_directory
from tandem.pooling_model import JudgeStyle, PoolingModel, read_pooling_model
from tandem.process.heartbeat import Heartbeat
from tandem.process.lifetime import Lifetime, OneAtATime, RouterPlace, end, router_main
from tandem.rpc.cluster_credentials import open_credentials
from tandem.rpc.cluster_grpc import ClusterAuth, ClusterChannels
from tandem.rpc.hosts import hold, join, reachable
from tandem.rpc.worker_directory import ChangingDirectory, WorkerAddress
from tandem.telemetry.setup import instance_id, open_tracer, reload_sample_ratio
from tandem.telemetry.tracing import Tracer
from tandem.values.block_hash import BlockHasher
from tandem.values.ids import Incarnation
from tandem.values.worker_identity import draw_incarnation

_COLLECT_AFTER = (20_000, 20, 20)
"""Objects allocated and not freed before a young collection: hardly anything here is in a cycle, and with Python's
default of 700 a busy router would run one for every second request."""
_log = logging.getLogger(__name__)


async def serve(config: ClusterConfig, place: RouterPlace, lifetime: Lifetime) -> None:
    """Join the workers, open the servers, serve until stopped, drain. What is entered last is closed first."""
    secret, registry = cluster_secret(config), _registry(config)
    tls = cluster_tls(config, has_parent=place.ready_fd is not None)
    credentials = open_credentials(tls, peer_hosts(config))
    channels = ClusterChannels(credentials, allows_plaintext=tls.mode == "off")
    async with AsyncExitStack() as stack:
        predecessor = await _check_ports(stack, config, place)
        tokenizer = await asyncio.to_thread(Tokenizer.load, model_directory(config.model.path))
        defaults = await asyncio.to_thread(_generation_defaults, config.model)
        pooling = await asyncio.to_thread(_pooling_model, config.model)
        heart = stack.enter_context(Heartbeat(place.ready_fd, beats=place.shared_folder is not None))
        tracer = _open_tracer(stack, config, place, lifetime)
        limits = _open_limits(stack, config, place, secret, incarnation := draw_incarnation())
        access = await stack.enter_async_context(AccessControl(config.router, limits))
        lifetime.on_reread(access.check_files)
        joined = await _join_workers(stack, config, registry, channels, incarnation, limits, tokenizer)
        cluster_state, fleet, named_anew, room = joined
        lifetime.on_reread(OneAtATime(ConfiguredWorkers(place.config_path, named_anew).read))
        if not await wait_for_workers(registry, fleet.addresses, lifetime, predecessor):
            return
        model = _served_model(registry, tokenizer, defaults, pooling)
        metrics = make_metrics(config, model.name, access, cluster_state, room)
        lifetime.on_reread(OneAtATime(ConfiguredPoolSizes(place.config_path, config, metrics.stated_workers).read))
        if credentials is not None:
            watch = CertificateWatch(credentials, fleet.addresses)
            metrics.registry.register(await stack.enter_async_context(watch))
        peers = await _join_host_peers(stack, place, metrics)
        decisions = DecisionLog(config.router.decisions_kept, clock=time.monotonic)
        dispatcher = make_dispatcher(config, registry, metrics, secret, decisions)
        gate = make_admission_queue(config, dispatcher, registry, time.monotonic, limits.limiter, metrics)
        frontend = _make_frontend(config.router, model, tokenizer, secret, tracer, limits.limiter)
        frontend.adapters = await _served_adapters(config, place, model.name, limits.limiter, cluster_state)
        _measure(metrics, frontend, dispatcher)
        _complete(stack, frontend, config, await _kept_prompts(stack, config, registry, place))
        canary = Canary(registry, dispatcher, hash_root=frontend.hash_root(CANARY_SALT))
        readiness = ReadinessCheck(registry, metrics, canary.answering, access.not_ready_reason)
        gate.refuse_while(canary.no_tokens_reason)
        status = await open_status(stack, place, model, dispatcher, gate, metrics, decisions, readiness)
        batches = await open_batches(stack, frontend, dispatcher, gate, config.router, metrics)
        extras = OptionalRoutes(
            decisions=decisions, status=status, batches=batches, profiles=_profile_routes(config, channels, fleet)
        )
        app = create_app(frontend, dispatcher, readiness, config.router, metrics, extras, access)
        bounds = connection_bounds(config.router.connections, raise_file_limit())
        server = build_server(
            frontend, dispatcher, config.router, metrics, bounds.grpc, shares_port=True, keeper=access
        )
        http, rpc = await _open_servers(stack, config, place, app, server, bounds.http, access.tls, predecessor)
        reached = ReachableWorkers(registry, canary, addresses=fleet.addresses, publish=heart.send)
        handing = await _await_successor(stack, config, place, http, lifetime, reached, predecessor)
        probes = await _begin_probes(stack, canary, config, registry, dispatcher, frontend, metrics)
        _announce(heart, config.router.host, http, rpc, model)
        await stack.enter_async_context(reached)
        await lifetime.wait()
        readiness.drain()
        status.close()
        await probes.aclose()  # a drain would wait for what they ask
        leaves_to = await _port_takeover(config, peers, handing)
        await drain(dispatcher, http, rpc, drain_s=config.decode.drain_s, leaves_to=leaves_to)


def _make_frontend(
    config: RouterConfig, model: ModelInfo, tokenizer: Tokenizer, secret: bytes, tracer: Tracer, limiter: RateLimiter
) -> Frontend:
    return Frontend(
        model=model,
        tokenizer=tokenizer,
        config=config,
        secret=secret,
        tracer=tracer,
        max_concurrent=limiter.max_concurrent,
    )


def _open_tracer(stack: AsyncExitStack, config: ClusterConfig, place: RouterPlace, lifetime: Lifetime) -> Tracer:
    tracer = open_tracer(stack, config.telemetry, service="tandem-router", instance=instance_id("router"))
    lifetime.on_reread(OneAtATime(partial(reload_sample_ratio, place.config_path, tracer)))
    return tracer


async def _begin_probes(
    outer: AsyncExitStack,
    canary: Canary,
    config: ClusterConfig,
    registry: WorkerRegistry,
    dispatcher: Dispatcher,
    frontend: Frontend,
    metrics: RouterMetrics,
) -> AsyncExitStack:
    """Begin to probe workers; the result ends that, at the latest with `outer`."""
    stack, settings = await outer.enter_async_context(AsyncExitStack()), config.router.quality
    await stack.enter_async_context(canary)
    if settings.shadow_share:
        root = frontend.hash_root(SHADOW_SALT)
        shadow = ShadowScoring(registry, dispatcher, share=settings.shadow_share, hash_root=root, rng=Random())
        metrics.registry.register(await stack.enter_async_context(shadow))
        dispatcher.on_answer = shadow.on_answer
    if settings.period_s is not None:
        probe = QualityProbe(
            registry,
            dispatcher,
            tokens=tuple(frontend.tokenizer.encode(settings.text)),
            hash_root=frontend.hash_root(QUALITY_SALT),
            period_s=settings.period_s,
        )
        metrics.registry.register(await stack.enter_async_context(probe))
    return stack


def _profile_routes(config: ClusterConfig, channels: ClusterChannels, fleet: WorkerFleet) -> ProfileRoutes | None:
    if not config.profiling.enabled:
        return None
    proof = ClusterAuth(cluster_secret(config)).client_metadata()
    return ProfileRoutes(Profiles(config.profiling, fleet.addresses, proof, channels.open))


def _announce(heart: Heartbeat, where: str, http: HttpServer, rpc: GrpcServer, model: ModelInfo) -> None:
    _collect_seldom()
    shown = reachable(where)
    addresses = {"http": f"{http.scheme}://{join(shown, http.port)}", "grpc": join(shown, rpc.port)}
    task: dict[str, str] = {} if model.pooling is None else {"task": model.pooling.task.value}
    heart.begin({**addresses, "has_chat_template": model.has_chat_template, **task})
    _log.info("router serves HTTP on %s:%d and gRPC on %s:%d", where, http.port, where, rpc.port)


async def _check_ports(stack: AsyncExitStack, config: ClusterConfig, place: RouterPlace) -> RunningRouter | None:
    """Return the running router that will hand its ports over, if any. Raises OSError when another process has a port.

    For processes that share their ports, the parent has already checked.
    """
    if place.shared_folder is not None:
        return None
    predecessor = await asyncio.to_thread(RunningRouter.connect, config.router)
    if predecessor is not None:
        stack.callback(predecessor.close)
        return predecessor
    for port in (config.router.port, config.router.grpc_port):
        hold(config.router.host, port).close()
    return None


def _registry(config: ClusterConfig) -> WorkerRegistry:
    most, rejoin_s = config.router.prompt_cache.max_pins, config.router.rejoin_s
    return WorkerRegistry(prefix_map=PrefixMap(), clock=time.monotonic, max_pins=most, rejoin_s=rejoin_s)


def _complete(stack: AsyncExitStack, frontend: Frontend, config: ClusterConfig, kept: CachedPrompts) -> None:
    """Give the frontend what it needs before the servers open."""
    frontend.kept = kept
    frontend.grammars = grammars = _grammars(config, frontend.model)
    stack.push_async_callback(grammars.close)


def _measure(metrics: RouterMetrics, frontend: Frontend, dispatcher: Dispatcher) -> None:
    metrics.registry.register(frontend.prompts)
    adapters = frontend.adapters
    metrics.registry.register(
        AdapterMetrics(dispatcher.adapters, metrics.slices.adapters, adapters, is_remembered=adapters.remembers)
    )


def _collect_seldom() -> None:
    """Keep objects made at startup out of garbage collections: they live as long as the process."""
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


async def _served_adapters(
    config: ClusterConfig,
    place: RouterPlace,
    model_name: str,
    limiter: RateLimiter,
    cluster_state: RouterClusterState | None,
) -> ServedAdapters:
    """Identify the configured adapters, and share what is loaded later. Raises ConfigError for one whose files are
    missing or malformed, or that workers would refuse."""
    read_one = partial(read_adapter, max_rank=config.engine.max_adapter_rank, max_bytes=max_adapter_bytes(config))

    def read() -> list[Adapter]:
        paths = {name: Path(path).absolute() for name, path in config.model.adapters.items()}
        if place.shared_folder is None or not paths:
            return [read_one(name, path) for name, path in paths.items()]
        return identify_once(place.shared_folder, paths, read_one)

    folder = config.model.adapter_folder
    served = ServedAdapters(
        model_name,
        await asyncio.to_thread(read),
        folder=None if folder is None else Path(folder),
        may_use=limiter.may_use_adapter,
        read=read_one,
    )
    if place.shared_folder is not None:
        served.store = AdapterFile(place.shared_folder)
    if cluster_state is not None:
        cluster_state.share_adapters(served)
    return served


def _grammars(config: ClusterConfig, model: ModelInfo) -> GrammarProcess:
    return GrammarProcess(
        model_directory(config.model.path) / "tokenizer.json",
        vocab_size=model.vocab_size,
        eos_token_ids=sorted(model.eos_token_ids),
        compile_s=config.router.grammars.compile_s,
        compile_bytes=config.router.grammars.compile_bytes,
    )


async def _kept_prompts(
    stack: AsyncExitStack, config: ClusterConfig, registry: WorkerRegistry, place: RouterPlace
) -> CachedPrompts:
    """Build the named caches, including those of processes that share the ports."""
    settings, pins = config.router.prompt_cache, registry.pins
    caches = NamedCaches(clock=time.time, most=settings.max_named, max_ttl_s=settings.max_ttl_s)
    if place.shared_folder is None:
        return CachedPrompts(pins=pins, caches=caches)
    names = SharedNamedCaches(caches, pins, clock=time.monotonic)
    peers = NamedCacheExchange(place.shared_folder, index=place.index, names=names)
    return CachedPrompts(pins=pins, caches=caches, publish=(await stack.enter_async_context(peers)).publish)


async def _join_workers(
    stack: AsyncExitStack,
    config: ClusterConfig,
    registry: WorkerRegistry,
    channels: ClusterChannels,
    incarnation: Incarnation,
    limits: SharedRateLimits,
    tokenizer: Tokenizer,
) -> tuple[RouterClusterState | None, WorkerFleet, Callable[[frozenset[WorkerAddress]], None], StreamRoom]:
    """Keep sessions with all workers; with Redis, also with those it lists, and read their cache events from it.

    The third part of the result sets the addresses that the configuration names later.
    """
    # Each stream takes a second descriptor of the router's, from the reserve that connections leave.
    room = StreamRoom(raise_file_limit() // 8)
    named, secret = configured_addresses(config), cluster_secret(config)
    directory = ChangingDirectory(named)
    settings, named_anew = config.redis.redis_settings(), directory.replace
    cluster_state: RouterClusterState | None = None
    if settings is not None:
        cluster_state = RouterClusterState(
            settings, secret=secret, router=incarnation, registry=registry, limits=limits, stated=named
        )
        await stack.enter_async_context(cluster_state)
        directory, named_anew = cluster_state.directory, cluster_state.directory.state
    fleet = WorkerFleet(
        directory=directory,
        listener=registry,
        open_channel=channels.open,
        connect=channels.connect if channels.can_connect else None,
        knock=channels.knock,
        rng=SystemRandom(),
        settings=SessionSettings(
            metadata=ClusterAuth(secret).client_metadata(),
            incarnation=incarnation,
            silence_s=config.router.worker_silence_s,
            reads_redis=cluster_state is not None,
            new_native_streams=await asyncio.to_thread(_native_streams, tokenizer, room),
        ),
        expected=registry.expected,
    )
    await stack.enter_async_context(fleet)
    return cluster_state, fleet, named_anew, room


def _native_streams(tokenizer: Tokenizer, room: StreamRoom) -> Callable[[], NativeStreams] | None:
    """Get ready to write tokens natively, if that is possible. Blocks."""
    if tokenizer.json_texts is None:
        _log.info("Python writes all tokens to clients: with this tokenizer a token's text depends on those before it")
        room.most = 0
        return None
    return native_streams(room)


def _open_limits(
    stack: AsyncExitStack, config: ClusterConfig, place: RouterPlace, secret: bytes, incarnation: Incarnation
) -> SharedRateLimits:
    """Open the limits, with the account that the router processes of this host share."""
    account = None
    if place.shared_folder is not None:
        account = stack.enter_context(RateLimitFile(place.shared_folder, router=incarnation))
    return make_limits(config.router, secret, time.monotonic, account)


async def _join_host_peers(
    stack: AsyncExitStack, place: RouterPlace, metrics: RouterMetrics
) -> HostPeerExchange | None:
    """Share figures with the processes that share the ports."""
    if place.shared_folder is None:
        return None
    peers = HostPeerExchange(place.shared_folder, index=place.index, render=metrics.render)
    metrics.collect_with((await stack.enter_async_context(peers)).figures)
    usage = HostPeerExchange(place.shared_folder, index=place.index, render=metrics.usage.render, name="usage")
    metrics.usage.collect_with((await stack.enter_async_context(usage)).others)
    return peers


async def _open_servers(
    stack: AsyncExitStack,
    config: ClusterConfig,
    place: RouterPlace,
    app: ASGIApp,
    server: grpc.aio.Server,
    max_http: int,
    tls: ServerTlsState | None,
    predecessor: RunningRouter | None,
) -> tuple[HttpServer, GrpcServer]:
    where, drain_s = config.router.host, config.decode.drain_s
    shared = place.shared_folder is not None
    limits = ConnectionLimits.from_config(config.router.connections, most=max_http, write_timeout_s=WRITE_TIMEOUT_S)
    http = HttpServer(
        app, host=where, port=config.router.port, grace_s=drain_s, shares_port=shared, limits=limits, tls=tls
    )
    if predecessor is not None:
        http.inherit(predecessor.http)
    rpc = GrpcServer(server, host=where, port=config.router.grpc_port, grace_s=drain_s, tls=tls)
    # HTTP first, since its port is exclusive: gRPC's would let another process listen beside us.
    await stack.enter_async_context(http)
    await stack.enter_async_context(rpc)
    await rpc.set_serving(True)
    return http, rpc


async def _await_successor(
    stack: AsyncExitStack,
    config: ClusterConfig,
    place: RouterPlace,
    http: HttpServer,
    lifetime: Lifetime,
    reached: ReachableWorkers,
    predecessor: RunningRouter | None,
) -> ListenerHandover | None:
    """Offer the ports to a successor from now on, unless other processes share them."""
    if place.shared_folder is not None:
        return None
    handing = ListenerHandover(
        config.router,
        lambda: http.listening,
        reached=lambda: reached.addresses,
        on_handed_over=lifetime.stop,
        succeeds=predecessor is not None,
    )
    await stack.enter_async_context(handing)
    if predecessor is not None:
        predecessor.confirm_serving()
    return handing


async def _port_takeover(
    config: ClusterConfig, peers: HostPeerExchange | None, handing: ListenerHandover | None
) -> PortTakeover:
    if handing is not None:
        await handing.close()  # a successor starting now would share the ports with a router that refuses requests
        return PortTakeover.SUCCESSOR if handing.is_handed_over else PortTakeover.NOBODY
    if peers is None or not await peers.others():
        return PortTakeover.NOBODY
    return PortTakeover.LAST_OF_TWO if config.router.processes == 1 else PortTakeover.OTHERS


def make_dispatcher(
    config: ClusterConfig,
    registry: WorkerRegistry,
    metrics: RouterMetrics,
    secret: bytes,
    decisions: DecisionLog,
) -> Dispatcher:
    """Build the dispatcher over the registry's live workers."""
    settings, rng = config.router, Random(secrets.randbits(256))
    placer = Placer(
        registry=registry,
        model=cost_model(settings),
        rng=rng,
        clock=time.monotonic,
        decisions=decisions,
        observer=metrics.placement,
    )
    return Dispatcher(
        placer=placer,
        hasher=BlockHasher(secret),
        clock=time.monotonic,
        rng=rng,
        observer=metrics,
        settings=DispatchSettings(
            max_attempts=settings.max_attempts,
            rejoin_s=settings.rejoin_s,
            max_queue_s=settings.max_queue_s,
            stream_buffer_tokens=settings.stream_buffer_tokens,
            hedging=hedging_settings(settings),
        ),
    )


def _generation_defaults(model: ModelSection) -> GenerationDefaults:
    if model.generation_config == "none":
        return GenerationDefaults()
    return load_generation_defaults(model_directory(model.path))


def _pooling_model(model: ModelSection) -> PoolingModel | None:
    style = None if model.reranker == "auto" else JudgeStyle(model.reranker)
    return read_pooling_model(model_directory(model.path), style)


def _served_model(
    registry: WorkerRegistry, tokenizer: Tokenizer, defaults: GenerationDefaults, pooling: PoolingModel | None
) -> ModelInfo:
    """Describe the model by its workers and its files. Raises ConfigError where they do not fit each other."""
    model = replace(_model_info(registry), has_chat_template=tokenizer.has_chat_template, defaults=defaults)
    tokenizer.check_fits(model.vocab_size)
    return model if pooling is None else replace(model, pooling=completed(pooling, tokenizer, model.vocab_size))


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


if __name__ == "__main__":
    end(router_main(serve))
