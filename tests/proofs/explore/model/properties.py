"""What must hold in every state, checked where it would break."""

from collections.abc import Iterable

from kv_transfer.protocol.actions import CommitInfo
from kv_transfer.protocol.messages import Reserve
from tests.proofs.explore.model.life import DONE, LANDED, LOOSE, MOVING, OPEN, OWNED, Life, Packed, SenderSlot

Contents = tuple[tuple[tuple[int, int], ...], ...]
"""Of each block of a prompt: (position, what the cell there holds)."""


class Violation(AssertionError):
    """A property does not hold."""


def no_writer_into(life: Life, blocks: Iterable[int], why: str, *, unreported: bool = False) -> None:
    """No destination changes hands while a write that may still land names it.

    `unreported`: nor while its own writer has not reported, whose bytes may be complete before it has stopped.
    """
    for write in life.writes:
        touched = {block for block, _position in write.slots}.intersection(blocks)
        awaited = unreported and any(life.blocks[block][0] == write.attempt for block in touched)
        if touched and (awaited or write.phase in (MOVING, LOOSE)):
            raise Violation(f"block {min(touched)} {why} while its writer may be alive")


def writes_its_own(life: Life, attempt: int, slots: tuple[tuple[int, int], ...]) -> None:
    """Bytes land only in blocks that belong to their own attempt."""
    for slot, _position in slots:
        owner = life.blocks.get(slot, (None, ()))[0]
        if owner != attempt:
            raise Violation(f"attempt {attempt} wrote into block {slot}, which belongs to {owner}")


def given_up_once(life: Life, attempt: int, blocks: Iterable[int]) -> None:
    """A block leaves its owner once, and by its owner's word alone."""
    for block in blocks:
        if life.blocks.get(block, (None, ()))[0] != attempt:
            raise Violation(f"attempt {attempt} gives block {block} away, which is not its own")


def right_content(life: Life, blocks: tuple[int, ...], first: int, what: str, *, needed: Contents) -> None:
    """What decoding may read is what was asked for, in its place. `needed`: see `Scope.needed_content`."""
    for index, block in enumerate(blocks, first):
        cells = life.blocks[block][1]
        if any(cells[position] != content for position, content in needed[index]):
            raise Violation(f"{what}: block {block} should hold block {index} of the prompt, but holds cells {cells}")


def committable(life: Life, info: CommitInfo, num_needed: int | None, *, needed: Contents) -> None:
    """A commit is whole, unique, and touched by nobody. `num_needed`: blocks of a prompt; None for a fetched prefix."""
    if life.request != OPEN:
        raise Violation(f"commits when the request is {life.request}")
    if not info.blocks or num_needed not in (None, len(life.kept) + len(info.blocks)):
        raise Violation(f"commits {len(life.kept) + len(info.blocks)} blocks of {num_needed}")
    if num_needed is not None and not life.tokens:
        raise Violation("commits without a first token")
    right_content(life, tuple(life.kept) + info.blocks, 0, "commits wrong KV", needed=needed)
    no_writer_into(life, info.blocks, "is committed", unreported=True)


def sampled_once(life: Life) -> None:
    """The client sees one first token."""
    if life.tokens:
        raise Violation("a second first token reaches the client")


def holds_sources(sender: SenderSlot | None, doing: str) -> SenderSlot:
    """Sources are there as long as something reads them."""
    if sender is None or not sender.holds:
        raise Violation(f"{doing} sources that the engine does not hold")
    return sender


def may_write(reserve: Reserve | None, lane: int, rewrite: int, max_rewrites: int) -> None:
    """Writing waits to be let in, and ends."""
    if reserve is None or lane >= len(reserve.grants):
        raise Violation("writes before it is let in")
    if rewrite > max_rewrites:
        raise Violation(f"writes a chunk for the {rewrite + 1}th time")


def granted_to(granted: tuple[int, int], writer: tuple[int, int]) -> None:
    """A grant is used by the process that it was given to: any proof of quiet is about that one."""
    if granted != writer:
        raise Violation(f"process {writer} writes through a grant that process {granted} was given")


def sources_unread(life: Life, at: int, epoch: int, attempt: int) -> None:
    """No source is given back before its reads end."""
    for write in life.writes:
        if (write.at, write.epoch, write.attempt) == (at, epoch, attempt) and write.phase == MOVING:
            raise Violation(f"sources of attempt {attempt} are freed while chunk {write.seq} reads them")


def at_rest(packed: Packed) -> None:
    """Between moves: an engine holds sources only for a sender, a block belongs to something alive."""
    alive = {attempt for attempt, _receiver in packed.receivers}
    for block, (owner, _content) in packed.blocks:
        if owner == OWNED:
            if packed.request != OPEN or block not in packed.kept:
                raise Violation(f"block {block} leaks: the request is {packed.request}")
        elif owner not in alive:
            raise Violation(f"block {block} leaks: attempt {owner} has ended")
    for write in packed.writes:
        if write.phase == LANDED:
            continue
        sender = packed.workers[write.at].sender
        current = packed.workers[write.at].epoch == write.epoch
        if write.phase == MOVING and current and (sender is None or sender.attempt != write.attempt):
            raise Violation(f"attempt {write.attempt} writes, but its sender has ended")
    for (attempt, lane), _grant in packed.grants:
        if attempt not in alive and ("quiet", attempt, lane) not in packed.owed:
            raise Violation(f"the grant of attempt {attempt} leaks")
    if packed.request == DONE and packed.kept:
        raise Violation("a finished request keeps blocks")
