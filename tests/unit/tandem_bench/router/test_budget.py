"""The budget of the router's processor time: every sample has one stage, and the table adds up."""

from pathlib import Path

import pytest

from tandem.profiling.stacks import StackTally
from tandem_bench.errors import CannotMeasure
from tandem_bench.router import budget
from tandem_bench.router.budget import OTHER_THREADS, REST, STAGES, Calls, count_calls, divide, measure, stage_of

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("stack", "stage"),
    [
        (["run (uvloop/__init__.py)"], REST),
        (["run (uvloop/__init__.py)", "Connection.data_received (router/http/server/connection.py)"], "HTTP: head"),
        (["chat (router/http/openai/generation.py)", "place (router/placement/worker_selection.py)"], "placement"),
        (["place (router/placement/worker_selection.py)", "__init__ (<string>)"], "placement"),
        (["JsonBody.read (router/http/body/json_body.py)", "parse (router/api/request/strict_json.py)"], "body"),
        (["AdmissionQueue.turn (router/dispatch/admission_queue.py)"], "admission"),
        (["RequestMeter.tokens (router/api/request_meter.py)"], "metrics"),
        (["ChoiceText.feed (router/api/answer/choice_text.py)"], "text of"),
        (["EventStream.write (router/http/body/sse.py)"], "answer"),
        (["Server.start (router/grpc/server.py)"], REST),
        (["_Call._read (aio/_call.py)"], "session"),
        (["RequestResponseCycle.send (http/httptools_impl.py)"], "HTTP: head"),
    ],
)
def test_stage_is_that_of_the_innermost_known_frame(stack: list[str], stage: str) -> None:
    assert stage_of(stack).startswith(stage)


def test_stages_name_files_that_exist() -> None:
    ours = [part for parts in STAGES.values() for part in parts if part.startswith(("router/", "tandem/"))]
    assert ours
    assert [part for part in ours if not (ROOT / part).exists()] == []


def test_divided_time_adds_up() -> None:
    tally = StackTally()
    tally.add(["place (router/placement/worker_selection.py)"], 3)
    tally.add(["run (uvloop/__init__.py)"], 1)
    assert divide(tally, loop_us=100.0, other_us=7.0) == {"placement": 75.0, REST: 25.0, OTHER_THREADS: 7.0}
    with pytest.raises(CannotMeasure, match="it was idle"):
        divide(StackTally(), loop_us=1.0, other_us=0.0)


@pytest.mark.turn(1)
def test_budget_of_a_running_router_has_every_large_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request, token = measure(requests=800, streams=64)
    for one, stages in ((request, ("placement", "admission", "dispatch")), (token, ("session with workers",))):
        assert all(one.by_stage[stage] > 0.0 for stage in stages), one.by_stage
        # Anything that grows here has no stage yet.
        assert one.by_stage.get(REST, 0.0) < 0.5 * one.total_us
    calls = (Calls(name="chat request", by_stage={REST: 3.0}), Calls(name="streamed token", by_stage={REST: 0.5}))
    monkeypatch.setattr(budget, "measure", lambda: (request, token))
    monkeypatch.setattr(budget, "count_calls", lambda: calls)
    found = budget.rows(tmp_path)
    of_request = [row.value for row in found if row.name.startswith("chat request: ")]
    assert sum(of_request) == pytest.approx(2 * request.total_us)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["chat-request.svg", "streamed-token.svg"]


@pytest.mark.parametrize(("has_compiler", "most"), [(True, 8.0), (False, 20.0)])
def test_calls_for_a_request_and_a_token_stay_few(
    has_compiler: bool, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor whose cache holds little of the router, every call costs as much as a hundred in a loop."""
    if not has_compiler:
        monkeypatch.setenv("PATH", "/nowhere")  # so tokens are written by Python
    request, token = count_calls(requests=200, streams=64)
    assert 300.0 < request.total < 600.0, request
    assert 0.4 * most < token.total < most, token
    assert request.by_stage.get(REST, 0.0) < 100.0, "what grows here has no stage yet"
