"""Each guard of the protocol, what it becomes when it is taken away, and the smallest world that misses it."""

from collections.abc import Callable
from typing import Any

from tests.proofs.explore.model.scope import Scope


def _no(*_: Any) -> bool:
    return False


def _yes(*_: Any) -> bool:
    return True


def _sealed(seal: Any, _num_verified: int, _coverage: Any) -> bool:
    return seal is not None


def _world(*only: str, **bounds: Any) -> Scope:
    return Scope(**{"num_layers": 1, "max_faults": 1, **bounds}, only=frozenset(only) or None)


REMOVALS: dict[str, tuple[Callable[..., bool], Scope]] = {
    "stale_attempt": (_no, _world("repeat", "deadline", "refuse to bind", max_attempts=2)),
    "stale_incarnation": (_no, _world()),
    "misdirected": (_no, _world("repeat", "crash", max_faults=2)),
    "superseded": (_no, _world()),
    "out_of_range": (_no, _world("bend", bent=True, num_layers=2)),
    "repeated_chunk": (_no, _world("repeat", "damage", max_faults=2, max_rewrites=2)),
    "rewrites_exhausted": (_no, _world("damage", max_faults=2)),
    "repeated_first_token": (_no, _world()),
    "wrong_identity": (_no, _world("computes other tokens", mistakes=True)),
    "complete": (_sealed, _world()),
    "continuable": (_yes, _world()),
    "quiet": (_yes, _world()),
    "drain_is_proof": (_yes, _world(remote=True)),
    "still_live": (_yes, _world()),
    "not_granted": (_no, _world()),
    "stale_nack": (_no, _world("repeat", "damage", max_faults=2, max_rewrites=2)),
    "out_of_time": (_no, _world()),
    "reads_pending": (_no, _world("repeat", "bend", bent=True, max_faults=2)),
    "unsealed_commit": (_no, _world("bend", bent=True)),
    "impossible_fetch": (_no, _world("bend", bent=True, fetch=True)),
    "wrong_binding": (_no, _world("bind too few")),
}

REDUNDANT: dict[str, str] = {
    "unexpected_size": "`out_of_range` and `complete` refuse what it let pass; it says early what is wrong",
    "beyond_seal": "a chunk beyond the seal covers cells of another, which `overlapping` refuses; it bounds a table",
    "overlapping": "against hostile peers; `complete` demands that every cell has landed",
    "altered_chunk": "against hostile peers; `complete` demands that every cell has landed",
    "contradicting_seal": "against hostile peers; the first SEAL stays, with or without it",
    "stale_verdict": "while `repeated_chunk` holds, one verification of a chunk is under way at a time",
}
"""Guards that no exploration misses alone, and what stands behind each."""
