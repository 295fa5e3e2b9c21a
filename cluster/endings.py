"""How a cluster, or a change of one, may end otherwise than was hoped."""


class ClusterFailed(Exception):
    """The cluster did not start, or could not be kept alive; the message holds the guilty process's last words."""


class ChangeFailed(Exception):
    """A change of the running cluster did not come to its end; what served before serves still."""


class StoppedEarly(Exception):
    """A stop was asked for before the cluster was ready."""
