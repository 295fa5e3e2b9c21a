"""The end of a group of ranks; apart from what they compute, so that whoever starts them need not load torch."""


class RankLost(Exception):
    """A rank has died, or does not answer: the group, and with it this process, cannot go on."""
