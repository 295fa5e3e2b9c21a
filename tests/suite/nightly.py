"""`python -m tests.suite.nightly [PART …] [--logs FOLDER]`: the long proofs at full count, in parts.

Each part ends within `LIMIT_S` or is red. What failed, if it is little, is run once more by itself: what passes then is
FLAKY, and red all the same if it is on the list of unsteady tests. Its log and its outcomes stay in `nightly/COMMIT/`,
so that the parts of one commit may be run on different days; the table at the end says how every part of the commit
stands. The list is not written here: the tree would no longer be the commit's.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.suite import rotation, unsteady
from tests.suite.run import ROOT, UNSTEADY_LIST

LIMIT_S = 6_000
_LONG = "slow and not gpu"
_TESTS_FAILED, _NO_TESTS = 1, 5  # pytest's exit codes


def _modules(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/test_{name}.py" for name in names)


PARTS: dict[str, tuple[str, ...]] = {
    "engine": ("tests/unit/engine", "tests/unit/worker", "tests/unit/prefill_worker", "tests/unit/decode_worker"),
    "engine-whole": ("tests/integration/engine",),
    "kv": ("tests/unit/kv_transfer", "tests/integration/handoff"),
    "proofs": (
        *("tests/proofs/explore", "tests/proofs/kills", "tests/proofs/streams"),
        *("tests/proofs/faults/test_faults.py", "tests/proofs/faults/test_taken_away.py"),
    ),
    "proofs-one-host": ("tests/proofs/faults/test_full_one_host.py",),
    "proofs-network": ("tests/proofs/faults/test_full_network.py",),
    "router": ("tests/unit/router", "tests/integration/redis"),
    "cluster": (
        *("tests/unit/cluster", "tests/unit/tandem", "tests/unit/tandem_bench", "tests/unit/monitoring"),
        *("tests/unit/docs", "tests/unit/suite", "tests/unit/support", "tests/unit/training", "tests/chart"),
        *("tests/browser", "tests/unit/test_house_rules.py", "tests/unit/test_private_names.py"),
    ),
    "images": ("tests/images", "tests/integration/test_hub_download.py"),
    "packaging": ("tests/packaging",),
    "tools": ("tests/tools",),
    "containers": ("tests/containers",),
    "answers": (
        *_modules(
            "tests/e2e/answers",
            *("adapters", "cache_tiers", "clients", "fetching", "generation_config", "parity"),
            *("pinned_prompts", "pipelined", "prompt_scores", "speculation", "structured", "tools", "walk"),
        ),
        "tests/e2e/models",
    ),
    "settings": ("tests/e2e/settings",),
    "answers-ranks": _modules("tests/e2e/answers", "nodes", "tensor_parallel", "unequal_pools"),
    "failures": _modules(
        "tests/e2e/failures",
        *("abort_storm", "aborts", "bad_input", "bad_input_page", "dead_engines", "dying_processes"),
        *("hostile_sockets", "incidents", "redis"),
    ),
    "kills": _modules("tests/e2e/failures", "kills", "router_takeover", "sentinel", "stall", "standby"),
    "streams": _modules("tests/e2e/failures", "scale", "streams"),
    "operation": ("tests/e2e/operation",),
}
"""Every test belongs to one part (`tests/unit/suite/test_nightly.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartResult:
    """How one part of the nightly ended."""

    part: str
    exit_code: int | None  # None: not over within LIMIT_S
    seconds: float
    last_line: str
    flaky: Sequence[str] = ()
    """Tests that failed, and passed when they were run again."""
    num_passed: int = 1

    def is_green(self) -> bool:
        """Whether all tests passed that there are here; a part whose tests were all skipped has shown nothing."""
        return self.exit_code == _NO_TESTS or (self.exit_code == 0 and self.num_passed > 0)

    def render(self) -> str:
        state = "green" if self.is_green() else "RED" if self.exit_code is not None else "RED (out of time)"
        if self.exit_code == 0 and not self.num_passed:
            state = "all skipped"
        line = f"{self.part:14} {state:18} {self.seconds / 60:6.1f} min  {self.last_line}"
        return "\n".join([line, *(f"{'':14} FLAKY {test}" for test in self.flaky)])


def run_part(part: str, folder: Path, limit_s: float = LIMIT_S, root: Path = ROOT) -> PartResult:
    """Run one part with its log and outcomes in `folder`, and keep the result there."""
    log = folder / f"{part}.log"
    outcomes = folder / f"{part}.jsonl"
    outcomes.unlink(missing_ok=True)
    log.unlink(missing_ok=True)
    began = time.monotonic()
    chosen = ["-m", _LONG, *PARTS[part]]
    exit_code = _run_pytest(chosen, log, outcomes, limit_s, root)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    flaky: list[str] = []
    if exit_code == _TESTS_FAILED and (failed := _failed(outcomes)) and unsteady.too_many(failed) is None:
        exit_code = _run_pytest(failed, log, outcomes, limit_s - (time.monotonic() - began), root)
        known = unsteady.parse((root / UNSTEADY_LIST).read_text(encoding="utf-8"))
        flaky = failed if exit_code == 0 else []
        if unsteady.debts(known).intersection(flaky):
            exit_code = _TESTS_FAILED
    result = PartResult(
        part=part,
        exit_code=exit_code,
        seconds=round(time.monotonic() - began, 1),
        last_line=lines[-1].strip("= ") if lines else "",
        flaky=flaky,
        num_passed=_num_passed(outcomes),
    )
    (folder / f"{part}.json").write_text(json.dumps(asdict(result)), encoding="utf-8")
    return result


def _run_pytest(args: Sequence[str], log: Path, outcomes: Path, limit_s: float, root: Path) -> int | None:
    """Run pytest with its output appended to `log`; its exit code, or None where the limit ended it."""
    command = [sys.executable, "-m", "pytest", "-q", "--timeout", "3600"]
    command += ["-p", "tests.suite.outcomes", f"--outcomes={outcomes}", *args]
    with log.open("a", encoding="utf-8") as stream:
        try:
            done = subprocess.run(
                command,
                cwd=root,
                env={**os.environ, rotation.VARIABLE: "none"},
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
    return done.returncode


def _num_passed(outcomes: Path) -> int:
    if not outcomes.exists():  # the limit ended pytest while it was starting
        return 0
    return outcomes.read_text(encoding="utf-8").count('"outcome": "passed"')


def _failed(outcomes: Path) -> list[str]:
    """The tests that failed; none where something was wrong that a second run cannot settle."""
    lines = [json.loads(line) for line in outcomes.read_text(encoding="utf-8").splitlines()]
    if any(line["outcome"] == "uncollected" for line in lines):
        return []
    return [line["test"] for line in lines if line["outcome"] == "failed"]


def summary(folder: Path) -> tuple[list[str], bool]:
    """A line for each part as it stands in `folder`, and whether every part is green."""
    lines: list[str] = []
    green = True
    for part in PARTS:
        path = folder / f"{part}.json"
        if not path.exists():
            lines.append(f"{part:14} not run")
            green = False
            continue
        result = PartResult(**json.loads(path.read_text(encoding="utf-8")))
        lines.append(result.render())
        green = green and result.is_green()
    return lines, green


def commit_name(root: Path = ROOT) -> str:
    """The commit that is checked out, with `-changed` behind it where the tree differs."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
    status = ["git", "status", "--porcelain", "--untracked-files=no"]
    changed = subprocess.run(status, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    return head.stdout.strip() + ("-changed" if changed else "")


def main(args: Sequence[str]) -> int:
    """Run the parts named, or all; 0 when all that ran are green."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all when none is named")
    parser.add_argument("--logs", type=Path, default=ROOT / "nightly", help="where the folder of the commit is made")
    options = parser.parse_args(args)
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}: there are {', '.join(PARTS)}")
    folder = options.logs / commit_name()
    folder.mkdir(parents=True, exist_ok=True)
    red = 0
    for part in options.parts or PARTS:
        result = run_part(part, folder)
        print(result.render(), flush=True)
        red += not result.is_green()
    lines, green = summary(folder)
    print(f"The nightly of {folder.name}, logs in {folder}:", *lines, sep="\n  ")
    print("Every part is green." if green else "Not every part is green.")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
