"""Exceptions of the supervisor: failures of a process, a cluster or a change."""

import signal


class ClusterFailed(Exception):
    """The cluster did not start or could not be kept alive; the message has the failed process's last log lines."""


class ChangeFailed(Exception):
    """A change of the running cluster was not completed; what served before still serves."""


class StoppedEarly(Exception):
    """A stop was requested before the cluster was ready."""


def describe_exit(status: int) -> str:
    """Render an exit status: `exited with code 2`, or `was ended by SIGKILL`."""
    if status >= 0:
        return f"exited with code {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
