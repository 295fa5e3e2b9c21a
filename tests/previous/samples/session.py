"""Of the session between routers and workers."""

from array import array
from collections.abc import Callable
from typing import Any

from google.protobuf.json_format import MessageToDict

from router.fleet import session_wire
from router.fleet.session_wire import transfers_from_pb
from tandem.protocol import wire
from tandem.protocol.pin_wire import order_from_pb, result_from_pb, totals_from_pb
from tandem.v1 import common_pb2, session_pb2
from tandem.values.ids import Incarnation
from tandem.values.outputs import FinishReason

from .filling import filled, kinds_of
from .sample import OF_ONE_VERSION, Sample, facts, without_versions


def session_samples() -> dict[str, Sample]:
    found = {}
    for side, form in (("router", session_pb2.RouterMessage), ("worker", session_pb2.WorkerMessage)):
        for kind in kinds_of(form.DESCRIPTOR):
            found[_RECORDED_AS.get(f"{side}/{kind}", f"{side}/{kind}")] = Sample(
                write=lambda form=form, kind=kind: _session_message(form(), kind),
                read=lambda data, form=form, side=side: _read_session(form.FromString(data), side),
            )
    for code in wire._ERRORS:
        failure = session_pb2.Refused(failure=common_pb2.Failure(code=code, message="no"))
        found[f"error/{code}"] = Sample(
            write=lambda failure=failure: failure.SerializeToString(),
            read=lambda data: type(session_wire.refused_from_pb(session_pb2.Refused.FromString(data)).error).__name__,
        )
    for reason in FinishReason:
        found[f"finish/{reason.value}"] = Sample(
            write=lambda reason=reason: session_pb2.Finish(reason=wire.finish_reason_to_pb(reason)).SerializeToString(),
            read=lambda data: wire.finish_reason_from_pb(session_pb2.Finish.FromString(data).reason).value,
        )
    return found


_RECORDED_AS = {
    "router/fetch_cache": "router/inherit",
    "router/cache_offer_ended": "router/settled",
    "router/take_over": "router/adopt",
    "router/end_earlier_sessions": "router/supersede",
    "router/score_prompt": "router/read",
    "worker/cache_offer": "worker/bequest",
    "worker/cache_fetched": "worker/inherited",
    "worker/prompt_scores": "worker/read",
    "worker/pin_result": "worker/pin_told",
}
"""Names that samples keep, so that each version finds the other's, for kinds that have been renamed."""


def _session_message(message: Any, kind: str) -> bytes:
    getattr(message, kind).SetInParent()
    if kind == "orders":
        for order in ("cancel", "resync"):
            filled(getattr(message.orders.orders.add(), order)).SetInParent()
    else:
        filled(getattr(message, kind))
    if kind == "hello":
        message.hello.MergeFrom(_spoken(type(message.hello)))
    return message.SerializeToString(deterministic=True)


def _spoken(form: Any) -> Any:
    """Which versions of the session this code speaks, in a HELLO of either side."""
    hello = session_wire.hello_to_pb(Incarnation(5)).hello
    versions = {name: getattr(hello, name) for name in OF_ONE_VERSION if hasattr(hello, name)}
    return form(**{name: value for name, value in versions.items() if value})


_FIELDS_RECORDED_AS = {"reads_redis": "reads_board", "redis_publishing": "board"}
"""The same for fields."""


def _as_recorded(found: dict[str, Any]) -> dict[str, Any]:
    return {_FIELDS_RECORDED_AS.get(name, name): value for name, value in found.items()}


_READERS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("worker", "tokens"): lambda body: [session_wire.tokens_from_pb(delta) for delta in body.deltas],
    ("worker", "refused"): session_wire.refused_from_pb,
    ("worker", "transfer_failed"): session_wire.transfer_failed_from_pb,
    ("worker", "kv_events"): session_wire.prefix_change_from_pb,
    ("worker", "load"): lambda body: _as_recorded(facts(session_wire.load_from_pb(body))),
    ("worker", "cache_offer"): session_wire.cache_offer_from_pb,
    ("worker", "cache_fetched"): session_wire.migration_source_from_pb,
    ("worker", "prompt_scores"): session_wire.scores_part_from_pb,
    ("worker", "pin_result"): result_from_pb,
    ("router", "submit"): lambda body: wire.sampling_from_pb(body.sampling),
    ("router", "pin"): order_from_pb,
}
"""What the receiving side makes of a kind of message."""


def _read_session(message: Any, side: str) -> Any:
    kind = message.WhichOneof("kind")
    body = getattr(message, kind)
    read = _READERS.get((side, kind), lambda _body: None)
    if (side, kind) == ("worker", "hello"):
        return without_versions(facts(session_wire.hello_from_pb(message)))
    fields = _as_recorded(without_versions(MessageToDict(body, preserving_proto_field_name=True)))
    return {"said": fields, "read": facts(read(body))}


def _rows(step: Any) -> list[list[int]]:
    return [list(row) for row in zip(step.handles, step.indexes, step.token_ids, strict=True)]


def report_samples() -> dict[str, Sample]:
    """Parts of messages that only some workers send, or are sent."""
    report = session_pb2.TransferReport
    pins = session_pb2.LoadSnapshot.DESCRIPTOR.fields_by_name["pins"].message_type._concrete_class
    return {
        "report/transfers": Sample(
            write=lambda: filled(report()).SerializeToString(deterministic=True),
            read=lambda data: facts(transfers_from_pb(report.FromString(data))),
        ),
        "report/columns": Sample(
            write=lambda: session_pb2.StepTokens(
                handles=[1, 1 << 40], indexes=[7, 0], token_ids=[5, 1 << 20]
            ).SerializeToString(deterministic=True),
            read=lambda data: _rows(session_pb2.StepTokens.FromString(data)),
        ),
        "report/prompt": Sample(
            write=lambda: session_pb2.Submit(
                prompt=wire.token_ids_to_bytes(array("i", [1, 0, 1 << 20]))
            ).SerializeToString(deterministic=True),
            read=lambda data: list(wire.prompt_from_pb(session_pb2.Submit.FromString(data))),
        ),
        "report/pins": Sample(
            write=lambda: filled(pins()).SerializeToString(deterministic=True),
            read=lambda data: facts(totals_from_pb(pins.FromString(data))),
        ),
    }
