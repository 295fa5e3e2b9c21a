"""Random histories of a pipelined, offloading engine over a real model: every answer is the undisturbed one."""

import random
import threading

import pytest
import torch

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.model.loader import load_model
from engine.types.request import FinishReason
from tandem.errors import Unavailable
from tests.support.engine.paged_harness import reference_model
from tests.support.engine.storm import Rig, Undisturbed, assert_same_answers, random_requests, storm


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """In float32 the compiled kernels compute the same bits in every batch: answers are compared with `==`."""
    path = tmp_path_factory.mktemp("model")
    reference_model("Qwen3ForCausalLM", num_hidden_layers=2).save_pretrained(path)
    options = BackendOptions(device=torch.device("cpu"), dtype="float32", kernels="auto", num_threads=1)
    return load_model(path, backend=select_backend(options))


@pytest.fixture(scope="module")
def undisturbed(model):
    """Storms of one seed bring the same requests in every mode."""
    return Undisturbed(model)


MODES = {
    "waiting-offload": {"pipelined": False, "late": False, "offload": True},
    "ahead-offload": {"pipelined": True, "late": False, "offload": True},
    "late-recompute": {"pipelined": True, "late": True, "offload": False},
    "late-offload": {"pipelined": True, "late": True, "offload": True},
}
TIGHT = {"num_slots": 8, "num_blocks": 12, "prefill_chunk_tokens": 20, "max_running_requests": 4}
NUM_CLIENTS = 4
WAIT_S = 60.0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [6, pytest.param(300, marks=pytest.mark.slow)])
def test_storm_equals_undisturbed_answers(model, undisturbed, mode, count):
    seen = [storm(model, undisturbed, seed, **MODES[mode]) for seed in range(count)]
    assert sum(one.preemptions for one in seen)
    assert sum(one.copied for one in seen)
    assert bool(sum(one.ahead for one in seen)) == MODES[mode]["pipelined"]
    assert bool(sum(one.saved for one in seen)) == bool(sum(one.loaded for one in seen)) == MODES[mode]["offload"]
    if count > 100:
        assert frozenset().union(*(one.reasons for one in seen)) == frozenset(FinishReason)


@pytest.mark.parametrize(
    ("mode", "count"),
    [("ahead-offload", 2), ("late-offload", 2), *(pytest.param(mode, 300, marks=pytest.mark.slow) for mode in MODES)],
)
def test_storm_with_cache_tiers_equals_undisturbed_answers(model, undisturbed, mode, count, tmp_path):
    """Each storm but the first finds files left by another."""
    host_hits = disk_hits = 0
    for seed in range(10 * count):
        one = storm(model, undisturbed, seed, **MODES[mode], count=6, cache_folder=tmp_path)
        host_hits, disk_hits = host_hits + one.host_hits, disk_hits + one.disk_hits
        # What is on disk in time depends on the disk: not every storm finds some.
        if seed + 1 >= count and host_hits and disk_hits:
            return
    raise AssertionError(f"{10 * count} storms, {host_hits} hits in host memory and {disk_hits} on disk")


def client(rig, requests, draw):
    """On its own thread: sends requests, and aborts some."""
    for request in requests:
        rig.engine.call(lambda _, request=request: rig.add(request)).result(WAIT_S)
        if draw.random() < 0.3:
            for _ in range(draw.randrange(20)):  # each is a turn of the engine
                rig.engine.call(lambda _: None).result(WAIT_S)
            rig.engine.call(lambda scheduler, request=request: scheduler.abort(request.request_id)).result(WAIT_S)


@pytest.mark.parametrize("count", [2, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("late", [False, True])
def test_storm_with_client_threads_equals_undisturbed_answers(model, undisturbed, late, count):
    num_preemptions = 0
    for seed in range(count):
        orders = random_requests(random.Random(seed), 16)
        requests = [one for i, ask in enumerate(orders) for one in ask.requests(f"{i}", arrival_s=float(i))]
        rig = Rig(model, pipelined=True, late=late, **TIGHT)
        rig.engine.start()
        threads = [
            threading.Thread(target=client, args=(rig, requests[i::NUM_CLIENTS], random.Random(i)))
            for i in range(NUM_CLIENTS)
        ]
        for thread in threads:
            thread.start()
        assert {rig.ends.get(timeout=WAIT_S) for _ in requests} == rig.received.keys()
        for thread in threads:
            thread.join(WAIT_S)
        assert rig.engine.stop(WAIT_S)
        rig.finish()
        num_preemptions += rig.num_preemptions  # who meets whom is up to the threads: in some storms nobody has to go
        assert rig.num_ahead
        assert_same_answers(rig, undisturbed.answers(orders))
    assert num_preemptions


@pytest.mark.parametrize("late", [False, True])
def test_engine_stopped_mid_step_reports_the_step_first(model, undisturbed, late):
    orders = random_requests(random.Random(3), 8)
    rig = Rig(model, pipelined=True, late=late, **TIGHT)
    rig.engine.start()
    for i, ask in enumerate(orders):
        for request in ask.requests(f"{i}", arrival_s=float(i)):
            rig.engine.call(lambda _, request=request: rig.add(request)).result(WAIT_S)
    rig.ends.get(timeout=WAIT_S)
    assert rig.engine.stop(WAIT_S)
    rig.scheduler.check_invariants()
    assert not any(request.num_in_flight_tokens for request in rig.scheduler._table.requests.values())
    assert_same_answers(rig, undisturbed.answers(orders))
    with pytest.raises(Unavailable):
        rig.engine.call(lambda _: None).result(WAIT_S)
