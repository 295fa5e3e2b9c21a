from array import array

import pytest

from decode_worker.orders import request_from_pb, route_from_pb
from decode_worker.task import DecodeTask, SentTokens, TaskPhase
from decode_worker.task_index import TaskIndex
from router.fleet.session_wire import submit_to_pb
from router.types.session_events import SubmitOrder
from tandem.errors import InvalidRequest, InvariantError
from tandem.protocol.session_versions import PROMPT_BYTES_SINCE
from tandem.v1 import common_pb2 as common
from tandem.v1 import session_pb2 as pb
from tandem.values.ids import BlockId, Incarnation, RequestId, TransferId
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.ledger_host import parts
from worker.decisions.destinations import Destinations
from worker.session_port import SessionPort

A, B = TransferId("a"), TransferId("b")


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(i) for i in ids)


def test_reservation_last_destination_returned_is_settled() -> None:
    out = Destinations()
    out.bind(A, blocks(1, 2, 3))
    out.bind(B, blocks(4))
    assert len(out) == 4
    assert out.settle(blocks(1, 2)) == []
    assert out.settle(blocks(4, 3)) == [B, A]
    assert len(out) == 0
    out.bind(B, blocks(1))
    assert out.settle(blocks(1)) == [B]


def test_destinations_bound_or_settled_twice_are_refused() -> None:
    out = Destinations()
    out.bind(A, blocks(1))
    with pytest.raises(InvariantError):
        out.bind(B, blocks(1))
    out.settle(blocks(1))
    with pytest.raises(InvariantError):
        out.settle(blocks(1))


def task(port: SessionPort, name: str, *, attempt: int = 1, transfer: TransferId | None = None) -> DecodeTask:
    return DecodeTask(
        port=port,
        request_id=RequestId(name),
        attempt=attempt,
        request=ledger.request([1, 2, 3]),
        route=None,
        transfer_id=transfer,
        holder=None,
        arrived_s=0.0,
        sent=SentTokens(()),
    )


def test_task_index_finds_task_by_every_name_until_removed() -> None:
    emptied = []
    book = TaskIndex(lambda: emptied.append(True))
    port, other = SessionPort(Incarnation(1)), SessionPort(Incarnation(2))
    one = task(port, "r", transfer=A)
    same_name_elsewhere = task(other, "r")
    ended = []
    one.when_done.append(lambda: ended.append(True))
    book.add(one)
    book.add(same_name_elsewhere)
    assert len(book) == 2
    assert book.of_order(port, "r", 1) is book.of_transfer(A) is book.of_engine(one.engine_id) is one
    assert book.of_order(port, "r", 2) is None
    assert book.of_port(other) == [same_name_elsewhere]
    book.remove(one)
    assert one.phase is TaskPhase.DONE
    assert one.is_over
    assert ended == [True]
    assert emptied == []
    assert book.of_order(port, "r", 1) is book.of_transfer(A) is book.of_engine(one.engine_id) is None
    book.remove(same_name_elsewhere)
    assert emptied == [True]


def test_task_table_duplicate_attempt_or_transfer_is_refused() -> None:
    book = TaskIndex(lambda: None)
    port = SessionPort(Incarnation(1))
    book.add(task(port, "r", transfer=A))
    with pytest.raises(InvalidRequest):
        book.add(task(port, "r"))
    with pytest.raises(InvalidRequest):
        book.add(task(port, "s", transfer=A))
    book.add(task(port, "r", attempt=2))
    book.add(task(port, "t"))
    assert len(book) == 3


def test_task_each_reservation_has_own_key() -> None:
    one = task(SessionPort(Incarnation(1)), "r")
    first, second = one.next_reservation(), one.next_reservation()
    assert first != second
    assert one.reservation == second


def submit(**changes: object) -> pb.Submit:
    fields: dict[str, object] = {
        "request_id": "r",
        "attempt": 1,
        "prompt_token_ids": [1, 2, 3],
        "hash_root": ledger.ROOT,
        "sampling": common.SamplingParams(max_tokens=4, temperature=0.0),
    }
    return pb.Submit(**{**fields, **changes})  # type: ignore[arg-type]


def test_order_valid_becomes_request() -> None:
    order = submit(generated_token_ids=[4, 5], choice_index=2, priority=-3)
    request = request_from_pb(order, RequestId("7:r"), parts(), 12.0)
    assert request.request_id == "7:r"
    assert list(request.token_ids) == [1, 2, 3, 4, 5]
    assert (request.num_prompt_tokens, request.num_output_tokens) == (3, 2)
    assert (request.choice_index, request.priority, request.arrival_s) == (2, -3, 12.0)
    assert request.params.max_tokens == 4
    assert request.deadline_s is None
    assert request_from_pb(submit(timeout_s=2.5), RequestId("8:r"), parts(), 12.0).deadline_s == 14.5


@pytest.mark.parametrize("version", [PROMPT_BYTES_SINCE - 1, PROMPT_BYTES_SINCE])
def test_order_has_prompt_as_worker_of_that_version_reads_it(version: int) -> None:
    tokens = [0, 1, ledger.VOCAB - 1]
    order = SubmitOrder(
        request_id=RequestId("r"),
        attempt=1,
        choice_index=0,
        prompt_token_ids=array("i", tokens),
        generated_token_ids=(5,),
        sampling=SamplingParams(max_tokens=4),
        hash_root=ledger.ROOT,
        priority=0,
        timeout_s=None,
        prefill=None,
        prediction=array("i", [7, ledger.VOCAB - 1]),
    )
    wire = submit_to_pb(order, 1, version).submit
    assert (list(wire.prompt_token_ids), len(wire.prompt)) == (([], 12) if version == 5 else (tokens, 0))
    request = request_from_pb(wire, RequestId("1:r"), parts(), 0.0)
    assert (list(request.token_ids), request.num_prompt_tokens) == ([*tokens, 5], 3)
    assert request.prediction == array("i", [7, ledger.VOCAB - 1])
    wire.ClearField("prediction")  # as routers of the version before send it
    assert request_from_pb(wire, RequestId("1:r"), parts(), 0.0).prediction is None


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt_token_ids": [ledger.VOCAB]}, "prompt_token_ids"),
        ({"prompt_token_ids": [2**32 - 1]}, "prompt_token_ids"),
        ({"prompt": array("i", [1, ledger.VOCAB]).tobytes()}, "prompt_token_ids"),
        ({"prompt": array("i", [-1, 2]).tobytes()}, "prompt_token_ids"),
        ({"prompt": bytes(7)}, "prompt"),
        ({"generated_token_ids": [ledger.VOCAB]}, "generated_token_ids"),
        ({"prediction": array("i", [ledger.VOCAB]).tobytes()}, "prediction"),
        ({"prediction": array("i", [-1]).tobytes()}, "prediction"),
        ({"prediction": bytes(6)}, "prediction"),
        ({"hash_root": b"short"}, "hash_root"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 257}, "request_id"),
        ({"sampling": common.SamplingParams(temperature=-1.0)}, "temperature"),
        ({"sampling": common.SamplingParams(logit_bias={ledger.VOCAB: 1.0})}, "logit_bias"),
    ],
)
def test_order_invalid_is_refused_naming_field(changes: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        request_from_pb(submit(**changes), RequestId("1:r"), parts(), 0.0)
    assert refused.value.param == param


def test_route_parsed_names_worker_address_and_transfer() -> None:
    whole = pb.PrefillRoute(worker_id="p", incarnation=9, address="127.0.0.1:1", transfer_id="t", attempt=2)
    transfer_id, route = route_from_pb(whole)
    assert transfer_id == "t"
    assert (route.worker_id, route.incarnation, route.address, route.attempt) == ("p", 9, "127.0.0.1:1", 2)
    for name in ("worker_id", "address", "transfer_id"):
        lacking = pb.PrefillRoute()
        lacking.CopyFrom(whole)
        lacking.ClearField(name)
        with pytest.raises(InvalidRequest):
            route_from_pb(lacking)
