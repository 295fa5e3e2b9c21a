"""An HTTP application with every route that there can be."""

from tempfile import mkdtemp

from starlette.types import ASGIApp

from router.fleet.profiles import Profiles
from router.http.admin.profiles import ProfileRoutes
from router.http.app import OptionalRoutes, create_app
from router.process.batch_setup import make_batches
from tandem.config.cluster import RouterConfig
from tandem.config.telemetry import ProfilingConfig
from tandem.rpc.cluster_grpc import ClusterChannels
from tests.support.router.servers import fakes
from tests.support.router.servers.batch_server import Room
from tests.support.router.servers.named_cache_world import World
from tests.support.router.whole_router import WholeRouter
from tests.support.router.whole_status import feed_of


def whole_app(config: RouterConfig | None = None) -> ASGIApp:
    config = config or RouterConfig()
    config = config.model_copy(update={"batches": config.batches.model_copy(update={"path": mkdtemp()})})
    parts, whole = World(fakes.make_tokenizer(), config).parts, WholeRouter(1)
    made = make_batches(parts.frontend, parts.generator, Room(), config, parts.metrics)
    assert made is not None
    batches, _ = made
    profiles = Profiles(ProfilingConfig(enabled=True), dict, (), ClusterChannels(None).open)
    extras = OptionalRoutes(
        decisions=whole.decisions, status=feed_of(whole), batches=batches, profiles=ProfileRoutes(profiles)
    )
    return create_app(parts.frontend, parts.generator, parts.ready, config, parts.metrics, extras)
