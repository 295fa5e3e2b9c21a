"""Reasons why a benchmark ends without its figures."""

from importlib import import_module
from pathlib import Path


class CannotMeasure(Exception):
    """Base class of the reasons; the message is for the user."""


class ClusterFailed(CannotMeasure):
    """A cluster did not start; the message has the last output of its processes."""


class ExtraMissing(CannotMeasure):
    """A package that only the extra `bench` installs is missing."""


class RequestFailed(CannotMeasure):
    """A cluster answered with an error, which is the message."""


class EvaluationFailed(CannotMeasure):
    """The model's evaluation ended with an error; the message has its last output."""


def require_clone(path: Path, purpose: str) -> None:
    """Raise CannotMeasure if `path`, which only a clone of the repository has, is missing."""
    if not path.exists():
        raise CannotMeasure(f"{purpose} needs a clone of the repository: there is no {path}")


def require_extra(module: str, purpose: str) -> None:
    """Raise ExtraMissing if `module`, which only the extra `bench` installs, cannot be imported."""
    try:
        import_module(module)
    except ImportError:
        raise ExtraMissing(
            f"{purpose} needs {module}, which the extra `bench` installs: pip install '.[bench]'"
        ) from None
