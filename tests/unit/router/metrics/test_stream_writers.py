"""Metrics of what writes tokens: they add up, and show the room that the router's streams have."""

from prometheus_client import CollectorRegistry

from router.fleet.native_streams import StreamRoom
from router.metrics.merge import merge
from router.metrics.router_metrics import RouterMetrics


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_tokens_are_those_of_native_code_and_the_rest() -> None:
    metrics = RouterMetrics("m")
    for writer in ("native", "python"):
        assert value(metrics.registry, "tandem_written_tokens_total", writer=writer) == 0
    metrics.generation_tokens.value += 50
    metrics.writers.num_native += 32
    assert value(metrics.registry, "tandem_written_tokens_total", writer="native") == 32
    assert value(metrics.registry, "tandem_written_tokens_total", writer="python") == 18


def test_room_is_shown_as_it_is_now() -> None:
    metrics = RouterMetrics("m")
    assert value(metrics.registry, "tandem_native_streams_limit") == 0
    metrics.writers.room = room = StreamRoom(7)
    room.num_open, room.num_full, room.num_without_descriptor = 3, 11, 5
    assert value(metrics.registry, "tandem_native_streams_limit") == 7
    assert value(metrics.registry, "tandem_native_streams") == 3
    missed = "tandem_native_streams_missed_tokens_total"
    assert (value(metrics.registry, missed, lacks="room"), value(metrics.registry, missed, lacks="descriptor")) == (
        11,
        5,
    )


def test_rooms_of_processes_that_share_ports_add_up() -> None:
    metrics = RouterMetrics("m")
    metrics.writers.room = room = StreamRoom(7)
    room.num_open = 3
    lines = merge([metrics.render()] * 2).decode().splitlines()
    assert {"tandem_native_streams 6.0", "tandem_native_streams_limit 14.0"} <= set(lines)
