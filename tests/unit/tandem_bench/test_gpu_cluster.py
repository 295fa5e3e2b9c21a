"""The GPU suite's part of whole clusters, without one: how answers are counted, and what a failure leaves behind."""

from pathlib import Path

import pytest

from tandem_bench.client import Completion
from tandem_bench.clusters import last_words
from tandem_bench.errors import CannotMeasure
from tandem_bench.gpu.cluster import part
from tandem_bench.gpu.cluster.load import Answers, num_different
from tandem_bench.gpu.cluster.plan import PAIRS, Plan, setups
from tandem_bench.gpu.cluster.runs import Expected
from tandem_bench.gpu.stage import Note, Stage
from tandem_bench.report import Row

GPU = Stage(device="cuda", shape="8b", seed=0, deadline_s=0.0)


def completion(*tokens: int) -> Completion:
    return Completion(
        request_id="cmpl-1",
        token_ids=tokens,
        cached_tokens=0,
        first_token_s=1.0,
        gaps_s=(),
        prefill_s=0.0,
        transfer_s=0.0,
    )


@pytest.mark.parametrize(
    ("found", "count"),
    [
        ([(1, 2), (4, 5)], 0),
        ([(1, 2)], 0),
        ([None, (4, 5)], 0),
        ([(1, 2), (4, 6)], 1),
        ([(2, 2), (3, 5)], 2),
        ([(1,), (4, 5)], 1),
        ([(), (4, 5)], 1),
        ([(1, 2, 3), (4, 5)], 1),
        ([(4, 5), (1, 2)], 2),
    ],
)
def test_different_answers_are_counted(found: list[tuple[int, ...] | None], count: int) -> None:
    assert num_different(found, [(1, 2, 3), (4, 5, 6), (7, 8, 9)], 2) == count


def test_more_answers_than_expected_ones_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        num_different([(1,), (2,)], [(1,)], 1)


def test_failed_and_different_answers_miss_their_goals() -> None:
    expected = Expected(Plan.of(GPU), GPU)
    expected.tokens = [(1, 2), (3, 4), (5, 6)]
    answers = Answers(completions=[completion(1, 2), None, completion(5, 7)], errors=["503: gone"], seconds=1.0)
    failed, different, note = expected.judge("x", answers, 2)
    assert isinstance(failed, Row)
    assert isinstance(different, Row)
    assert [(row.value, row.met) for row in (failed, different)] == [(1, False), (1, False)]
    assert note == Note(name="x: first error", text="503: gone")


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "NEEDS", ("httpx", "no_such_library", "no_such_package.module"))
    with pytest.raises(CannotMeasure, match=r"needs no_such_library, no_such_package\.module, which"):
        next(part.cluster(GPU))


def test_clusters_on_a_gpu_state_device_memory_and_transport(tmp_path: Path) -> None:
    made = {name: one.config([1, 2, 3, 4]) for name, one in setups(GPU, Plan.of(GPU), tmp_path, "cuda_ipc").items()}
    assert {name: one.get("transfer", {}).get("transport") for name, one in made.items()} == {
        "colocated": None,
        "cuda_ipc": "cuda_ipc",
        "tcp": "tcp",
    }
    workers = 0
    for one in made.values():
        engine = one["engine"]
        assert (engine["device"], engine["deterministic"], one["model"]["dtype"]) == ("cuda", True, "bfloat16")
        assert one["router"]["local_prefill_tokens"] == one["router"]["max_local_prefill_tokens"] == 0
        workers += one["prefill"]["replicas"] + one.get("decode", {"replicas": 1})["replicas"]
    assert made["cuda_ipc"]["decode"] == made["cuda_ipc"]["prefill"] == {"replicas": PAIRS}
    # All run at once, and the successors of two; each has a CUDA context of about half a gibibyte besides.
    assert workers == 7
    assert (workers + 2) * (engine["memory_bytes"] + (1 << 29)) < 78 << 30


def test_last_words_of_a_log_are_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(500)))
    lines = last_words(log).splitlines()
    assert len(lines) >= 60
    assert lines[-1] == "line 499"
