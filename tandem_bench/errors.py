"""Why a benchmark ends without its figures."""


class CannotMeasure(Exception):
    """Base of them all; the message is for the user."""


class ClusterFailed(CannotMeasure):
    """A cluster did not come up; the message holds what its processes said last."""


class RequestFailed(CannotMeasure):
    """A cluster answered with an error; the message is the cluster's."""


class EvaluationFailed(CannotMeasure):
    """The model's evaluation ended with an error; the message is its last words."""
