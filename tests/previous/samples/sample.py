"""A sample, and values as JSON has them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tandem.telemetry.tracing import TraceContext
from tandem.values.ids import BlockHash

SECRET = b"the secret of a cluster of samples"
NAMES = tuple(BlockHash(bytes([i]) * 16) for i in range(1, 4))
OF_ONE_VERSION = ("protocol_version", "newest_version", "versions")
"""What a HELLO says of the versions that its sender speaks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """How one is said, and what is read of it."""

    write: Callable[[], bytes]
    read: Callable[[bytes], Any]


def without_versions(fields: dict[str, Any]) -> dict[str, Any]:
    """What a HELLO says but for the versions that its sender speaks: those are its own."""
    return {name: value for name, value in fields.items() if name not in OF_ONE_VERSION}


def facts(value: Any) -> Any:
    """A value as JSON has it: by the names of its fields, so that one version may have more of them."""
    match value:
        case None | bool() | int() | float() | str() if not isinstance(value, Enum):
            return value
        case bytes():
            return value.hex()
        case Enum():
            return value.value
        case type():
            return value.__name__
        case Exception():
            return f"{type(value).__name__}: {value}"
        case TraceContext():
            return _trace_facts(value)
        case _ if is_dataclass(value):
            return {field.name: facts(getattr(value, field.name)) for field in fields(value)}
        case Mapping():
            return {str(key): facts(one) for key, one in value.items()}
        case _ if hasattr(value, "_fields"):
            return {name: facts(getattr(value, name)) for name in value._fields}
        case _ if hasattr(value, "__struct_fields__"):
            return {name: facts(getattr(value, name)) for name in value.__struct_fields__}
        case frozenset() | set():
            return sorted(map(facts, value))
        case _:
            return [facts(one) for one in value]


def _trace_facts(context: TraceContext) -> dict[str, Any]:
    """What a tracer reads of it: the version before parsed it where it came in."""
    carrier = {"traceparent": context.traceparent, "tracestate": context.tracestate}
    span = get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()
    named = {"trace_id": span.trace_id, "span_id": span.span_id, "sampled": span.trace_flags.sampled}
    return {**named, "state": span.trace_state.to_header()}
