"""The laptop preset's pods, started by `podman kube play`: they pass their probes, answer, and drain."""

import itertools
import time

import pytest

from tests.chart.rendering import preset, render
from tests.containers.engine import Engine
from tests.containers.images import SERVICES, Images
from tests.containers.played import ORDER, Played

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
_PATIENCE_S = 1200.0
"""Each worker compiles its kernels first: a pod's cache is its own, and empty."""


def test_pods_of_the_laptop_preset_serve_and_drain(engine: Engine, images: Images) -> None:
    values = preset("laptop")
    for name, image in (("router", images.router), ("worker", images.worker)):
        values["images"][name]["repository"] = image.partition(":")[0]
    repository, _, tag = SERVICES.rpartition(":")
    values["redis"]["image"] = {"repository": repository, "tag": tag, "pullPolicy": "Never"}
    with Played(engine, render(values)) as played:
        for component in ORDER:
            played.play(component)
        for component, kind in itertools.product(ORDER, ("startupProbe", "readinessProbe", "livenessProbe")):
            _wait_for(played, component, kind)
        # The chart's own test: it asks through the router's Service, with the release's first key.
        played.play("test")
        ends_s = time.monotonic() + _PATIENCE_S
        while played.state("test")["Status"] != "exited":
            assert time.monotonic() < ends_s, played.log("test")
            time.sleep(0.5)
        assert played.state("test")["ExitCode"] == 0, played.log("test")
        for component in ("router", "prefill", "decode"):
            assert played.stop(component) == 0, played.log(component)


def _wait_for(played: Played, component: str, kind: str) -> None:
    ends_s = time.monotonic() + _PATIENCE_S
    while not played.passes(component, kind):
        assert time.monotonic() < ends_s, f"{component} has not passed its {kind}: {played.log(component)}"
        time.sleep(0.5)
