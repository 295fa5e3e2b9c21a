"""Exceptions of the supervisor: how a process, a cluster or a change of one may fail."""

import signal


class ClusterFailed(Exception):
    """The cluster did not start, or could not be kept alive; the message holds the guilty process's last words."""


class ChangeFailed(Exception):
    """A change of the running cluster did not come to its end; what served before serves still."""


class StoppedEarly(Exception):
    """A stop was asked for before the cluster was ready."""


def describe_exit(status: int) -> str:
    """`exited with code 2`, or `was ended by SIGKILL`."""
    if status >= 0:
        return f"exited with code {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
