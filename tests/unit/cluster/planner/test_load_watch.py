"""Router metrics become a period's load: summed over routers, with exact moments, and never invented."""

from dataclasses import replace
from math import inf

import pytest

from cluster.planner.histogram import Histogram
from cluster.planner.load_watch import LoadWatch, Unseen, fullness, live_workers
from cluster.planner.router_figures import RouterFigures, read_figures
from cluster.planner.speed import SpeedWatch
from cluster.planner.values import Observation, Sizes
from cluster.simulator.model.simulation import Simulation
from cluster.simulator.studies.elastic import fullness as simulated_fullness
from tandem.errors import Code
from tandem.values.roles import WorkerRole
from tests.support.cluster.bound_clusters import Bottleneck, exposition, run_until_queue
from tests.support.cluster.planned_worker import PERIOD_S, TARGETS, WORKER
from tests.support.cluster.router_figures import RouterCounters, backlog, steps

FORGET_S = 60.0


def watch(speed: SpeedWatch | None = None) -> LoadWatch:
    return LoadWatch(speed or SpeedWatch(WORKER), ttft_s=TARGETS.ttft_s, forget_s=FORGET_S)


def seen(observed: Observation | Unseen) -> Observation:
    assert isinstance(observed, Observation), observed.why
    return observed


def why(observed: Observation | Unseen) -> str:
    assert isinstance(observed, Unseen)
    return observed.why


def test_load_watch_sums_period_over_all_routers() -> None:
    one, other, load_watch = RouterCounters(), RouterCounters(), watch()
    one.serve(500, prompt=30)
    assert "first reading" in why(load_watch.observe(0.0, {"a": one.figures(), "b": other.figures()}))
    one.serve(20)
    other.serve(10, output=300, cached=500)
    observation = seen(load_watch.observe(PERIOD_S, {"a": one.figures(), "b": other.figures(backlog(w=1000))}))
    assert observation.period_s == PERIOD_S
    assert (observation.demand.num_requests, observation.demand.num_answers) == (30, 30)
    assert observation.demand.output_tokens == 20 * 100 + 10 * 300
    assert observation.demand.cached_tokens == 5000
    assert (observation.num_first, observation.num_late) == (30, 0)
    assert observation.waiting_prompt_seconds == pytest.approx(1000 * WORKER.prompt_token_s)


def test_load_watch_estimates_prompt_seconds_and_context_tokens() -> None:
    router, load_watch = RouterCounters(), watch()
    load_watch.observe(0.0, {"a": router.figures()})
    router.serve(40, prompt=700, output=80)
    router.serve(10, prompt=7000, output=350)
    demand = seen(load_watch.observe(PERIOD_S, {"a": router.figures()})).demand
    truth = 40 * WORKER.prompt_seconds(0, 700) + 10 * WORKER.prompt_seconds(0, 7000)
    assert demand.prompt_tokens == 98_000
    assert demand.prompt_seconds == pytest.approx(truth, rel=0.1)
    squares = 40 * WORKER.prompt_seconds(0, 700) ** 2 + 10 * WORKER.prompt_seconds(0, 7000) ** 2
    assert demand.prompt_seconds_squared == pytest.approx(squares, rel=0.25)
    # Which prompt had which answer is not reported, so this is that of a mean prompt.
    mean_prompt = 98_000 / 50
    contexts = 40 * 80 * (mean_prompt + 80) + 10 * 350 * (mean_prompt + 350)
    assert demand.context_tokens == pytest.approx(contexts, rel=0.1)


def test_load_watch_counts_late_first_tokens_and_lost_requests() -> None:
    router, load_watch = RouterCounters(), watch()
    load_watch.observe(0.0, {"a": router.figures()})
    router.serve(8)
    router.serve(3, ttft_s=9.0)
    router.lose(2)
    router.lose(5, Code.CANCELLED)
    router.lose(4, Code.INVALID_ARGUMENT)
    router.lose(6, Code.RESOURCE_EXHAUSTED)
    of_limits = 'tandem_rejections_total{reason="tokens_per_minute"} 6.0\n'
    observation = seen(load_watch.observe(PERIOD_S, {"a": router.figures(of_limits)}))
    assert (observation.num_late, observation.num_first) == (5, 13)


def test_load_watch_restarted_router_skips_two_observations() -> None:
    router, other, load_watch = RouterCounters(), RouterCounters(), watch()
    router.serve(10_000)
    load_watch.observe(0.0, {"a": router.figures(), "b": other.figures()})
    router = RouterCounters()
    other.serve(3)
    assert "counts fell" in why(load_watch.observe(15.0, {"a": router.figures(), "b": other.figures()}))
    router.serve(7)
    assert "restarted" in why(load_watch.observe(30.0, {"a": router.figures(), "b": other.figures()}))
    router.serve(5)
    observation = seen(load_watch.observe(45.0, {"a": router.figures(), "b": other.figures()}))
    # What the other had is whole, over the whole time.
    assert (observation.period_s, observation.demand.num_requests) == (45.0, 8)


def test_load_watch_missing_router_process_causes_no_spike() -> None:
    router, part, load_watch = RouterCounters(), RouterCounters(), watch()
    router.serve(10_000)
    part.serve(400)
    load_watch.observe(0.0, {"a": router.figures()})
    assert "counts fell" in why(load_watch.observe(15.0, {"a": part.figures()}))
    router.serve(12)
    assert seen(load_watch.observe(30.0, {"a": router.figures()})).demand.num_requests == 12


def test_load_watch_silent_router_blocks_until_forgotten() -> None:
    one, other, load_watch = RouterCounters(), RouterCounters(), watch()
    load_watch.observe(0.0, {"a": one.figures(), "b": other.figures()})
    for at_s in (15.0, 30.0, 45.0, 60.0):
        one.serve(10)
        assert "b: refused" in why(load_watch.observe(at_s, {"a": one.figures(), "b": "refused"}))
    one.serve(10)
    observation = seen(load_watch.observe(75.0, {"a": one.figures(), "b": "refused"}))
    assert (observation.period_s, observation.demand.num_requests) == (75.0, 50)
    other.serve(900)
    one.serve(1)
    assert seen(load_watch.observe(90.0, {"a": one.figures(), "b": other.figures()})).demand.num_requests == 1
    other.serve(2)
    assert seen(load_watch.observe(105.0, {"a": one.figures(), "b": other.figures()})).demand.num_requests == 2


def test_load_watch_unlisted_router_is_not_waited_for() -> None:
    one, other, load_watch = RouterCounters(), RouterCounters(), watch()
    load_watch.observe(0.0, {"a": one.figures(), "b": other.figures()})
    one.serve(4)
    assert seen(load_watch.observe(15.0, {"a": one.figures()})).demand.num_requests == 4


def test_load_watch_without_routers_reports_why() -> None:
    load_watch = watch()
    assert why(load_watch.observe(0.0, {"a": "refused"})) == "a: refused"
    assert why(load_watch.observe(15.0, {})) == "no router was found"


def test_load_watch_counts_workers_once_across_routers() -> None:
    one, other, load_watch = RouterCounters(), RouterCounters(), watch()
    for router in (one, other):
        router.metrics.workers("prefill", "live", 2)
    other.metrics.workers("decode", "live", 3)
    figures = {"a": one.figures(backlog(p=100, q=50)), "b": other.figures(backlog(p=120))}
    load_watch.observe(0.0, figures)
    observation = seen(load_watch.observe(15.0, figures))
    assert observation.waiting_prompt_seconds == pytest.approx(170 * WORKER.prompt_token_s)
    assert live_workers(list(figures.values())) == Sizes(prefill=2, decode=3)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "-1.0", "1e300"])
@pytest.mark.parametrize(
    "name",
    [
        "vllm:request_prompt_tokens_sum",
        'vllm:time_to_first_token_seconds_bucket{le="+Inf"}',
        "vllm:prefix_cache_hits_total",
        'tandem_workers{role="decode",state="live"}',
        'tandem_queue_tokens{lacks="prefill"}',
        'tandem_worker_backlog_tokens{worker="w",role="prefill"}',
        'tandem_worker_step_seconds_total{worker="w",role="prefill",kind="prefill"}',
    ],
)
def test_router_figures_impossible_numbers_are_refused(name: str, value: str) -> None:
    router = RouterCounters()
    router.serve(3)
    with pytest.raises(ValueError, match=r"\bis\b|fewer"):
        read_figures(f"{router.text()}{name} {value}\n")


def test_histogram_not_cumulative_or_impossible_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="must be cumulative"):
        Histogram.from_cumulative({1.0: 5.0, 2.0: 3.0, inf: 6.0}, 7.0)
    with pytest.raises(ValueError, match="must be cumulative"):
        Histogram.from_cumulative({float("nan"): 5.0, inf: 6.0}, 7.0)
    for blocks in ("9" * 300, "-4"):
        with pytest.raises(ValueError, match="cache_config_info is"):
            RouterCounters().figures(
                f'vllm:cache_config_info{{engine="w",block_size="16",num_gpu_blocks="{blocks}"}} 1\n'
            )


def test_histogram_sum_decrease_means_router_restart() -> None:
    before = Histogram(bounds=(1.0, inf), counts=(3.0, 0.0), total=3.0)
    assert Histogram(bounds=(1.0, inf), counts=(9.0, 0.0), total=2.0).fell_below(before)
    assert not Histogram(bounds=(1.0, inf), counts=(3.0, 0.0), total=3.0 - 1e-15).fell_below(before)


@pytest.mark.parametrize("bottleneck", ["prefill", "decode"])
def test_load_watch_router_metrics_match_simulated_queue_and_kv(bottleneck: Bottleneck) -> None:
    looked: list[bool] = []

    def look(simulation: Simulation) -> None:
        looked.append(True)
        waiting = simulation.router.admission.fair.num_waiting_tokens
        figures = read_figures(exposition(simulation))
        # Prompts that wait for a place to decode are no work for more readers.
        assert figures.queued_tokens == (waiting if bottleneck == "prefill" else 0)
        assert figures.total_queued_tokens == waiting > 0
        assert figures.decode_kv_tokens
        # Every router reports the same workers, and its own queue.
        estimate = fullness([figures, replace(figures, total_queued_tokens=0.0)], figures.decode_kv_tokens)
        truth = simulated_fullness(simulation, figures.decode_kv_tokens)
        assert estimate[0] == truth[0] == (4 if bottleneck == "prefill" else 1)
        # Workers' word is half a second old.
        assert 0.0 < estimate[1] == pytest.approx(truth[1], abs=0.5)

    run_until_queue(bottleneck, look)
    assert looked


def test_gpu_room_full_workers_are_named_and_none_without_free_memory() -> None:
    blocks = 'tandem_worker_kv_blocks{worker="%s",role="%s",state="%s"} %d\n'
    workers = (("p", "prefill", 80), ("d", "decode", 30), ("e", "decode", 90))
    more = "".join(blocks % (n, r, "used", used) + blocks % (n, r, "free", 100 - used) for n, r, used in workers)
    more += 'tandem_worker_pinned_blocks{worker="e",role="decode"} 40\n'
    more += 'tandem_queue_tokens{lacks="decode"} 600.0\ntandem_queue_tokens{lacks="prefill"} 400.0\n'
    router, load_watch = RouterCounters(), watch()
    load_watch.observe(0.0, {"a": router.figures()})
    nothing = seen(load_watch.observe(15.0, {"a": router.figures()}))
    assert (nothing.num_decoding, nothing.taken_pools) == (0, 0.0)
    observation = seen(load_watch.observe(30.0, {"a": router.figures(more)}))
    assert observation.num_decoding == 2
    assert observation.taken_pools == pytest.approx(0.3 + 0.5 + 1000 / WORKER.kv_tokens)


def test_speed_watch_scales_profile_per_pool() -> None:
    router, speed = RouterCounters(), SpeedWatch(WORKER)
    load_watch = watch(speed)
    before = steps("p", "prefill", steps=100, seconds=10, tokens=50_000, requests=100)
    before += steps("d", "decode", steps=100, seconds=10, tokens=100, requests=100)
    load_watch.observe(0.0, {"a": router.figures(before)})
    router.serve(20)
    # A first word of workers says nothing: they may have worked for days.
    load_watch.observe(15.0, {"a": router.figures(before)})
    assert speed.factor(WorkerRole.PREFILL) == speed.factor(WorkerRole.DECODE) == 1.0
    took = 2.0 * (WORKER.step_s * 1000 + WORKER.prompt_token_s * 500_000)
    after = steps("p", "prefill", steps=1100, seconds=10 + took, tokens=550_000, requests=1100)
    after += steps("d", "decode", steps=50, seconds=5, tokens=50, requests=50)
    router.serve(20)
    load_watch.observe(30.0, {"a": router.figures(after)})
    assert 1.9 < speed.factor(WorkerRole.PREFILL) < 2.0
    assert speed.factor(WorkerRole.DECODE) == 1.0, "a worker that began anew"
    assert speed.prefill_worker.prompt_token_s == pytest.approx(2.0 * WORKER.prompt_token_s, rel=0.05)
    assert speed.decode_worker == WORKER


def test_speed_watch_uses_smallest_decode_pool() -> None:
    pools = 'vllm:cache_config_info{model_name="m",engine="%s",block_size="16",num_gpu_blocks="%d"} 1.0\n'
    roles = 'tandem_worker_backlog_tokens{worker="%s",role="%s"} 0.0\n'
    workers = (("p", 10, "prefill"), ("d", 300, "decode"), ("e", 200, "decode"))
    more = "".join(pools % (name, blocks) + roles % (name, role) for name, blocks, role in workers)
    speed = SpeedWatch(WORKER)
    assert speed.decode_worker.kv_tokens == WORKER.kv_tokens
    speed.observe([RouterCounters().figures(more)], prompt_tokens=0.0, context_tokens=None)
    assert speed.decode_worker.kv_tokens == 3200


def test_speed_watch_weighs_decode_steps_by_rows() -> None:
    speed = SpeedWatch(WORKER)
    router = RouterCounters()
    for at in (0, 10_000):
        rows = 8 * at
        took = 0.5 * (WORKER.step_s * at + (WORKER.row_s + WORKER.context_token_s * 900) * rows)
        figures = router.figures(steps("d", "decode", steps=at, seconds=took, tokens=rows, requests=rows))
        speed.observe([figures], prompt_tokens=800, context_tokens=900)
    assert 0.5 < speed.factor(WorkerRole.DECODE) < 0.51


def test_router_figures_foreign_metrics_are_refused() -> None:
    with pytest.raises(ValueError, match="not a router"):
        read_figures("# nothing\nup 1\n")
    with pytest.raises(ValueError, match="label"):
        read_figures(RouterCounters().text('tandem_worker_backlog_tokens{role="decode"} 3\n'))


def test_histogram_above_interpolates() -> None:
    spread = Histogram(bounds=(1.0, 2.0, inf), counts=(10.0, 10.0, 5.0), total=40.0)
    assert spread.above(2.0) == 5.0
    assert spread.above(1.5) == 10.0
    assert spread.above(0.0) == 25.0
    assert spread.above(99.0) == 5.0
    assert Histogram().above(1.0) == Histogram().moment(2) == 0.0


def test_histogram_plus_uses_common_bounds() -> None:
    one = Histogram(bounds=(1.0, 2.0, 5.0, inf), counts=(10.0, 20.0, 3.0, 4.0), total=70.0)
    other = Histogram(bounds=(2.0, 3.0, 4.0, inf), counts=(5.0, 1.0, 1.0, 2.0), total=30.0)
    both = Histogram(bounds=(2.0, inf), counts=(35.0, 11.0), total=100.0)
    assert one.plus(other) == other.plus(one) == both
    assert one.plus(Histogram(bounds=(7.0, inf), counts=(1.0, 0.0), total=3.0)).counts == (38.0,)


def test_load_watch_sums_routers_with_different_buckets() -> None:
    """Both are summed while both live; recorded lengths start anew with the new buckets."""

    def newer(router: RouterCounters) -> RouterFigures:
        """Without each second bound of prompts' lengths."""
        lines = router.text().splitlines(keepends=True)
        buckets = [line for line in lines if line.startswith("vllm:request_prompt_tokens_bucket")]
        return read_figures("".join(line for line in lines if line not in buckets[1:-1:2]))

    one, other, load_watch = RouterCounters(), RouterCounters(), watch()
    assert 4 < len(newer(one).prompts.bounds) < len(one.figures().prompts.bounds)
    load_watch.observe(0.0, {"a": one.figures(), "b": newer(other)})
    one.serve(30, prompt=700)
    other.serve(20, prompt=700)
    observation = seen(load_watch.observe(PERIOD_S, {"a": one.figures(), "b": newer(other)}))
    assert observation.demand.num_requests == 50
    assert observation.demand.prompt_tokens == 50 * 700
    for now_s in (2, 3):  # the other one is replaced: two looks are lost, as whenever a router begins anew
        assert "a" in why(load_watch.observe(now_s * PERIOD_S, {"a": newer(one), "b": newer(other)}))
    one.serve(40, prompt=900)
    observation = seen(load_watch.observe(4 * PERIOD_S, {"a": newer(one), "b": newer(other)}))
    assert observation.demand.num_requests == 40
    assert observation.demand.prompt_seconds == pytest.approx(40 * WORKER.prompt_seconds(0, 900), rel=0.1)
