"""Why a benchmark ends without its figures."""

from importlib import import_module


class CannotMeasure(Exception):
    """Base of them all; the message is for the user."""


class ClusterFailed(CannotMeasure):
    """A cluster did not come up; the message holds what its processes said last."""


class ExtraMissing(CannotMeasure):
    """A package that only the extra `bench` installs is missing."""


class RequestFailed(CannotMeasure):
    """A cluster answered with an error; the message is the cluster's."""


class EvaluationFailed(CannotMeasure):
    """The model's evaluation ended with an error; the message is its last words."""


def require_extra(module: str, purpose: str) -> None:
    """Raises ExtraMissing where `module`, which only the extra `bench` installs, cannot be imported."""
    try:
        import_module(module)
    except ImportError:
        raise ExtraMissing(
            f"{purpose} needs {module}, which the extra `bench` installs: pip install '.[bench]'"
        ) from None
