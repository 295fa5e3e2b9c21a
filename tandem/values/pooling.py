"""How the hidden states of a text become one vector."""

from enum import Enum


class PoolingMode(Enum):
    """One way of pooling; the values are sentence-transformers' names."""

    CLS = "cls"
    """The first token's state."""
    MAX = "max"
    MEAN = "mean"
    MEAN_SQRT_LEN = "mean_sqrt_len_tokens"
    """The sum of all states divided by the square root of their number."""
    WEIGHTED_MEAN = "weightedmean"
    """Their mean weighted by position, from 1."""
    LAST = "lasttoken"
