"""The error of a lost rank. It has a module of its own, so that the process that starts ranks need not load torch."""


class RankLost(Exception):
    """A rank has died or does not answer: the group, and with it this process, cannot go on."""
