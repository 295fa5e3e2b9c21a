"""Ids of a stream's events: parsed as written, and not forgeable."""

import base64
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.answer.stream_ids import MAX_CHOICES, StreamIds
from router.types.request_digest import DIGEST_BYTES
from router.types.stream_position import ChoicePosition, StreamHead, StreamPosition
from tandem.errors import InvalidRequest
from tandem.values.ids import Incarnation

SECRET, MOST_S = b"the secret of the cluster", 600.0
HEAD = StreamHead(request_id="0f" * 16, seed=2**64 - 1, created_s=1_700_000_000, digest=b"d" * DIGEST_BYTES)
IDS = StreamIds(SECRET, most_s=MOST_S, wall_clock=lambda: HEAD.created_s + 10.0)
POSITIONS = st.builds(
    ChoicePosition,
    worker=st.integers(0, 2**63 - 1).map(Incarnation),
    num_tokens=st.integers(0, 2**32 - 1),
    num_chars=st.integers(0, 2**32 - 1),
    ended=st.booleans(),
)


@given(st.lists(POSITIONS, min_size=1, max_size=MAX_CHOICES), st.booleans(), st.integers(0, 254))
def test_stream_id_round_trips(choices: list[ChoicePosition], usage_sent: bool, resumptions: int) -> None:
    head = replace(HEAD, resumptions=resumptions)
    text = IDS.write(head, choices, usage_sent=usage_sent).decode()
    assert IDS.read(text) == StreamPosition(head=head, choices=tuple(choices), usage_sent=usage_sent)
    assert text.isascii()
    assert "\n" not in text


def test_stream_id_with_changed_bit_is_refused() -> None:
    data = base64.urlsafe_b64decode(IDS.write(HEAD, [ChoicePosition(num_tokens=7)]))
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidRequest, match="Last-Event-ID"):
            IDS.read(base64.urlsafe_b64encode(changed).decode())


@pytest.mark.parametrize("text", ["", "x", "=", "é", "A" * 7, "A" * 4096, "\0", "-" * 80])
def test_stream_id_malformed_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="Last-Event-ID"):
        IDS.read(text)


def test_stream_id_of_other_cluster_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        StreamIds(b"another secret", most_s=MOST_S).read(IDS.write(HEAD, [ChoicePosition()]).decode())


def test_stream_id_resumptions_are_bounded() -> None:
    with pytest.raises(InvalidRequest, match="255 times"):
        IDS.read(IDS.write(replace(HEAD, resumptions=255), [ChoicePosition()]).decode())


@pytest.mark.parametrize(("age_s", "left"), [(-30.0, MOST_S), (0.0, MOST_S), (101.0, 500.0), (600.5, 0.5)])
def test_stream_id_has_age_of_stream(age_s: float, left: float) -> None:
    ids = StreamIds(SECRET, most_s=MOST_S, wall_clock=lambda: HEAD.created_s + age_s)
    assert MOST_S - ids.read(ids.write(HEAD, [ChoicePosition()]).decode()).age_s == pytest.approx(left)


@pytest.mark.parametrize("age_s", [601.0, 1e6])
def test_stream_id_expired_is_refused(age_s: float) -> None:
    ids = StreamIds(SECRET, most_s=MOST_S, wall_clock=lambda: HEAD.created_s + age_s)
    with pytest.raises(InvalidRequest, match="began more than 600 s ago"):
        ids.read(ids.write(HEAD, [ChoicePosition()]).decode())
