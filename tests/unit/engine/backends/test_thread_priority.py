"""An engine's thread, and no other, yields to event loops."""

import os
import subprocess
import sys
import threading

import pytest

from engine.backends import thread_priority
from engine.backends.thread_priority import NICENESS, lower_thread_priority, session_niceness
from tests.unit.engine.kernels.test_cpu_threads import in_a_thread

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="priorities belong to processes there")


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_thread_priority_covers_thread_and_children_only():
    before = niceness()

    def work():
        lower_thread_priority()
        return niceness(), in_a_thread(niceness)

    lowered = max(before, NICENESS)
    assert in_a_thread(work) == (lowered, lowered)
    assert niceness() == in_a_thread(niceness) == before


def test_thread_priority_higher_niceness_is_kept():
    nicer = max(niceness(), NICENESS + 3)

    def work():
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nicer)
        lower_thread_priority()
        return niceness()

    assert in_a_thread(work) == nicer


STEPS_BACK = """
from engine.backends.thread_priority import lower_thread_priority, session_niceness
lower_thread_priority()
print(session_niceness())
"""


def measured_session_niceness(*, leads: bool) -> str:
    """After a process of the session has lowered its priority."""
    command = [sys.executable, "-c", STEPS_BACK]
    done = subprocess.run(command, start_new_session=leads, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_session_priority_follows_leader():
    before = session_niceness()
    # A new session begins as nice as nobody is, where the system divides its processors between sessions at all.
    stepped_back = {f"{NICENESS}"} if before is not None else {f"{NICENESS}", "None"}
    assert measured_session_niceness(leads=True) in stepped_back
    assert measured_session_niceness(leads=False) == f"{before}"


@pytest.mark.parametrize("content", ["", "\n", None])
def test_session_priority_without_autogroup_is_unchanged(monkeypatch, tmp_path, content):
    autogroup = tmp_path / "autogroup"
    if content is not None:
        autogroup.write_text(content, encoding="ascii")
    monkeypatch.setattr(thread_priority, "_AUTOGROUP", autogroup)
    thread_priority._lower_session_priority()
    assert session_niceness() is None
    assert (autogroup.read_text(encoding="ascii") if autogroup.exists() else None) == content


def test_session_priority_busy_system_is_retried(monkeypatch):
    written = []

    class Autogroup:
        def read_text(self, *, encoding):
            return "/autogroup-7 nice 0"

        def write_text(self, text, *, encoding):
            written.append(text)
            if len(written) < 3:
                raise BlockingIOError

    monkeypatch.setattr(thread_priority, "_AUTOGROUP", Autogroup())
    monkeypatch.setattr(thread_priority, "_BETWEEN_TRIES_S", 0.0)
    thread_priority._lower_session_priority()
    assert written == [f"{NICENESS}"] * 3
