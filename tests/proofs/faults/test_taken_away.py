"""The fault layer can fail: it finds errors when a safeguard of a transport or the protocol is removed."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kv_transfer.memory.landing import Landing
from kv_transfer.protocol import guards
from kv_transfer.protocol.messages import TransferKey
from kv_transfer.transports.grants import GrantTable, WriteGrant
from kv_transfer.transports.one_sided import wire as one_sided_wire
from tests.proofs.faults import batch
from tests.proofs.faults.campaign import campaign
from tests.proofs.faults.plan import SOCKETS, Focus, Kind, Place


class Anything:
    """Equal to every checksum."""

    __hash__ = None

    def __eq__(self, _other: object) -> bool:
        return True


def no_payload_checksum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Landing, "checksum", lambda _self, _cells: Anything())


def no_claim_checksum(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(one_sided_wire, "unsealed", lambda data: data[:-4])


def keep_revoked_grants_open(patch: pytest.MonkeyPatch) -> None:
    def revoke(self: GrantTable, key: TransferKey) -> WriteGrant | None:
        grant = self._by_key.pop(key, None)
        if grant is not None:
            del self._by_token[grant.token]
        return grant

    patch.setattr(GrantTable, "revoke", revoke)


def commit_incomplete_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(guards, "complete", lambda seal, _num_verified, _coverage: seal is not None)


def never_trust_quiet_proofs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(guards, "quiet", lambda granted, _proven_quiet: not granted)
    patch.setattr(batch, "WAIT_S", 3.0)


@dataclass(frozen=True, kw_only=True)
class Removal:
    """The removed safeguard, the transport and faults; the expected finding, within so many hand-offs."""

    take_away: Callable[[pytest.MonkeyPatch], None]
    transport: str
    focus: Focus
    finds: str
    seed: int = 1
    """From which it is found soon; from 1 all are, within some 650 hand-offs."""
    within: int = 300


FLIPPED_PAYLOAD = Focus(kinds=(Kind.FLIP,), places=(Place.TO_RECEIVER,), heads=0.0)
REMOVALS = (
    Removal(take_away=no_payload_checksum, transport="tcp", focus=FLIPPED_PAYLOAD, finds="wrong bytes committed"),
    Removal(
        take_away=no_payload_checksum,
        transport="memory",
        focus=Focus(kinds=(Kind.FLIP, Kind.TRUNCATE), places=(Place.ORDERS,)),
        finds="wrong bytes committed",
    ),
    Removal(
        take_away=no_claim_checksum,
        transport="shm",
        focus=Focus(kinds=(Kind.FLIP,), places=SOCKETS, heads=1.0, greetings=0.9),
        finds="somebody wrote into free blocks",
        seed=95,
    ),
    Removal(
        take_away=keep_revoked_grants_open,
        transport="tcp",
        focus=Focus(kinds=(Kind.STALL, Kind.CUT), places=(Place.TO_RECEIVER, Place.ASKING, Place.TELLING)),
        finds="somebody wrote into free blocks",
        seed=2030,
        within=1500,
    ),
    Removal(
        take_away=commit_incomplete_blocks,
        transport="memory",
        focus=Focus(kinds=(Kind.TRUNCATE, Kind.REORDER), places=(Place.TELLING,)),
        finds="wrong bytes committed",
    ),
    Removal(
        take_away=never_trust_quiet_proofs,
        transport="memory",
        focus=Focus(kinds=(Kind.CUT,), places=(Place.TELLING,)),
        finds="leaked",
    ),
)


@pytest.mark.parametrize("removal", REMOVALS, ids=lambda removal: f"{removal.take_away.__name__}-{removal.transport}")
@pytest.mark.in_turns
def test_campaign_without_a_safeguard_finds_the_violation(removal: Removal, monkeypatch: pytest.MonkeyPatch) -> None:
    removal.take_away(monkeypatch)
    tally = campaign(removal.transport, count=removal.within, seed=removal.seed, focus=removal.focus)
    assert any(removal.finds in violation for violation in tally.violations), tally.violations
