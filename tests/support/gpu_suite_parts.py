"""Parts that end in every way a part can; test_gpu_suite.py runs them in processes of their own."""

import os
import signal
import threading

from tandem_bench.errors import CannotMeasure, ClusterFailed
from tandem_bench.gpu.stage import Findings, Note, Stage
from tandem_bench.report import figure


def good(stage: Stage) -> Findings:
    yield Note(name="device", text=str(stage.place))
    yield figure("missed", 1.0, "", at_least=2.0)
    yield figure("pid", os.getpid(), "")


def wrong(stage: Stage) -> Findings:
    yield figure("before", stage.seed, "")
    raise ArithmeticError("two and two")


def absent(stage: Stage) -> Findings:
    yield figure("before", stage.seed, "")
    raise CannotMeasure("there is no such library here")


def broken(stage: Stage) -> Findings:
    yield figure("before", stage.seed, "")
    raise ClusterFailed("not ready\n" + "".join(f"line {number} of its log\n" for number in range(100)))


def killed(stage: Stage) -> Findings:
    yield figure("before", stage.seed, "")
    os.kill(os.getpid(), signal.SIGKILL)


def stuck(stage: Stage) -> Findings:
    yield figure("before", stage.seed, "")
    threading.Event().wait()
