"""The file by which router processes of one host share changes of adapters, where it cannot be written."""

import fcntl
import time
from pathlib import Path

import pytest

from router.host_peers.adapters import AdapterFile
from tandem.cluster_state.entries import AdapterChange
from tests.support.router.adapters import adapter_of

CHANGE = AdapterChange(name="sql", version=1, adapter=adapter_of("sql"))


def test_adapter_file_behind_a_stopped_process_waits_once_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    now_s = 0.0

    def sleep(pause_s: float) -> None:
        nonlocal now_s
        pauses.append(pause_s)
        now_s += pause_s

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    own = AdapterFile(tmp_path)
    with open(tmp_path / "adapters.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another router process"):
            own.write([CHANGE])
        assert 0.0 < sum(pauses) < 0.5
        pauses.clear()
        with pytest.raises(OSError, match="another router process"):
            own.write([CHANGE])
        assert not pauses
    own.write([CHANGE])
    assert AdapterFile(tmp_path).read() == (CHANGE,)
