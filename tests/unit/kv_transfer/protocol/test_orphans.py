"""A prefill worker holds KV for nobody no longer than it must (docs/extend/incidents.md).

A peer that does not want it says so, or its link ends: then no timer is waited for. A silent peer has one lease.
"""

from collections import deque
from collections.abc import Callable

import pytest

from kv_transfer.protocol import actions as act
from kv_transfer.protocol import events as ev
from kv_transfer.protocol.messages import Abort
from kv_transfer.protocol.settings import TransferSettings
from kv_transfer.protocol.states import HandoffState
from tandem.config.cluster import ClusterConfig
from tests.support.kv_transfer.halves import TOKEN, Half, kinds
from tests.unit.kv_transfer.protocol.test_sender import FINISHED, RESERVE, offered, progress, sending, written

DEFAULT = TransferSettings()
MARGIN_S = 1e-3


def submitted() -> Half:
    half = sending()
    half.see(ev.Submitted())
    return half


def computed() -> Half:
    """The decode worker has neither refused nor reserved: it was full, and sends no answer."""
    half = offered()
    half.see(progress(10))
    half.see(ev.FirstTokenSampled(first_token=TOKEN))
    half.see(FINISHED)
    return half


def streaming() -> Half:
    half = offered()
    half.see(progress(10))
    half.hear(RESERVE)
    return half


def sealed() -> Half:
    half = computed()
    left = deque(half.hear(RESERVE))
    while left:
        if isinstance(one := left.popleft(), act.StartWrite):
            left += written(half, one.seq)
    return half


STAGES = pytest.mark.parametrize("stage", [submitted, offered, computed, streaming, sealed])


def assert_over(half: Half, actions: act.Actions) -> None:
    """The sources are freed as soon as their reads end."""
    found = kinds(actions)
    if "CancelWrites" in found:
        assert "ReleaseSources" not in found
        found += kinds(half.see(ev.WritesQuiet()))
    assert found.count("ReleaseSources") == 1
    assert half.state is HandoffState.CLOSED


@STAGES
@pytest.mark.parametrize("end", [Abort(reason="no room"), ev.LinkLost(reason="gone")], ids=["refused", "dead"])
def test_hold_refused_or_dead_ends_without_timer(stage: Callable[[], Half], end: object) -> None:
    half = stage()
    assert half.now == 0.0
    assert_over(half, half.hear(end) if isinstance(end, Abort) else half.see(end))


@STAGES
def test_hold_of_silent_peer_ends_with_lease(stage: Callable[[], Half]) -> None:
    half = stage()
    half.machine.renew(1.0)
    assert half.machine.on_timer(1.0 + DEFAULT.lease_s - MARGIN_S) == ()
    assert_over(half, half.machine.on_timer(1.0 + DEFAULT.lease_s + MARGIN_S))


def test_handoff_lease_default_is_two_seconds_everywhere() -> None:
    """Checked often enough that a lease hardly outlasts it."""
    assert sending().machine.plan.lease_s == DEFAULT.lease_s == ClusterConfig().transfer.lease_s == 2.0
    assert DEFAULT.sweep_s <= 0.1
