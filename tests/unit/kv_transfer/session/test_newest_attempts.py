"""What a prefill worker remembers of hand-offs that have ended."""

from kv_transfer.protocol.messages import TransferKey
from kv_transfer.session.sender_hub import NewestAttempts
from tandem.values.ids import TransferId


def key(number: int, attempt: int = 1) -> TransferKey:
    return TransferKey(transfer_id=TransferId(f"t{number}"), attempt=attempt)


def test_newest_attempts_keep_the_newest() -> None:
    newest = NewestAttempts()
    assert newest.get(TransferId("t1")) is None
    for attempt in (1, 2, 5):
        newest.add(key(1, attempt), 0.0)
        assert newest.get(TransferId("t1")) == attempt
    assert newest.get(TransferId("t2")) is None


def test_newest_attempts_keep_the_newest_over_generations() -> None:
    newest = NewestAttempts()
    newest.add(key(1, 1), 0.0)
    newest.add(key(1, 2), newest.REMEMBERED_S + 1.0)
    assert newest.get(TransferId("t1")) == 2


def test_newest_attempts_are_remembered_for_as_long_as_promised() -> None:
    newest, promised_s = NewestAttempts(), NewestAttempts.REMEMBERED_S
    now_s, begun_s = 0.0, {}
    while now_s < 5 * promised_s:
        newest.add(key(len(begun_s)), now_s)
        begun_s[len(begun_s)] = now_s
        assert all(newest.get(TransferId(f"t{n}")) == 1 for n, at_s in begun_s.items() if now_s - at_s < promised_s)
        now_s += 7.0
    assert len(newest) <= 2 * promised_s / 7.0 + 2


def test_newest_attempts_are_bounded_at_a_high_rate() -> None:
    newest, least = NewestAttempts(), NewestAttempts.LEAST_REMEMBERED
    for number in range(5 * least):
        newest.add(key(number), number * 1e-3)
        assert newest.get(TransferId(f"t{max(0, number - least + 1)}")) == 1
    assert len(newest) <= 2 * least
