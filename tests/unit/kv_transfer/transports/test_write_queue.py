"""The thread behind every writer: a bug in one write does not block the others."""

import threading

import pytest

from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports.write_queue import WriteJob, WriteQueue
from tandem.errors import TransferError
from tandem.values.ids import TransferId
from tests.support.kv_transfer.transport_peer import cell_range, order

ORDER = order(TransferKey(transfer_id=TransferId("t"), attempt=1), b"", cell_range(0, 1), [0])
WAIT_S = 20.0


def test_write_queue_exception_in_write_fails_it_and_all_queued(caplog: pytest.LogCaptureFixture) -> None:
    go = threading.Event()

    def perform(_job: WriteJob) -> None:
        assert go.wait(WAIT_S)
        raise ValueError("a bug")

    writes = WriteQueue("test", perform)
    futures = [writes.submit(ORDER) for _ in range(3)]
    go.set()
    for future in futures:
        with pytest.raises(TransferError, match="ValueError"):
            future.result(WAIT_S)
    assert writes.failed
    with pytest.raises(TransferError, match="ValueError"):
        writes.submit(ORDER).result(WAIT_S)
    assert "ValueError" in caplog.text
    writes.close()
