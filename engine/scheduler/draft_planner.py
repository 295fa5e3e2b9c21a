"""Adds drafts to a planned step: from what the requests and chunks have left of its budgets, and of the pool.

Drafts need blocks for the tokens that they may become. They take none that a running request may need for its next
token, or that the queue's head waits for, and never preempt: a draft that finds no block is cut. A block taken for
drafts that turn out wrong stays with its request, which fills it later.
"""

from engine.kv_cache.block_manager import BlockManager
from engine.scheduler.request_table import RequestTable
from engine.scheduler.settling import useful_drafts
from engine.scheduler.step_plan import StepPlan
from engine.speculation.proposer import Ask, Draft
from engine.speculation.speculation import Speculation
from engine.types.request import BatchItem, Request, RequestState


def plan_drafts(
    plan: StepPlan,
    speculation: Speculation,
    *,
    blocks: BlockManager,
    table: RequestTable,
    may_grow: bool,
) -> None:
    """Extend the plan's decodes by drafts. `may_grow`: blocks may be taken for them."""
    places = [place for place, item in enumerate(plan.items) if item.num_tokens == 1 and item.samples]
    most = speculation.max_drafts(len(places), beside_chunk=len(places) < len(plan)) if places else 0
    if not most:
        return
    limits = [(place, min(most, plan.tokens_left, _most_drafts(plan.items[place]))) for place in places]
    asked = [(place, Ask(plan.items[place].request, limit)) for place, limit in limits if limit > 0]
    drafts = speculation.propose([ask for _, ask in asked], len(places))
    num_running = len(table.running) if may_grow else None
    for (place, (request, _)), draft in zip(asked, drafts, strict=True):
        tokens = useful_drafts(request, draft.token_ids[: plan.tokens_left])
        if tokens:
            tokens = tokens[: _room(request, len(tokens), blocks, num_running)]
        if tokens:
            plan.add_drafts(place, tokens)
            speculation.launched(request, Draft(tokens, draft.source))


def _most_drafts(item: BatchItem) -> int:
    """Drafts after which the request could still get a token; none unless all of its tokens are known."""
    request = item.request
    if request.state is not RequestState.RUNNING or request.prefill_only or request.scoring is not None:
        return 0
    if request.end_rule is None or item.start + 1 != len(request.token_ids):
        return 0
    return request.end_rule.max_tokens - len(request.token_ids) - 1


def _room(request: Request, num_drafts: int, blocks: BlockManager, num_running: int | None) -> int:
    """How many of the drafts find a block, taking blocks for them; `num_running` None: of those it has."""
    size, spare = blocks.block_size, 0 if num_running is None else max(0, blocks.num_available - num_running)
    end = request.num_tokens + num_drafts
    while end > request.num_tokens and blocks.num_missing(request, end) > spare:
        end = (end - 1) // size * size  # one block less
    if end > request.num_tokens:
        blocks.extend(request, end)
    covered = blocks.coverable_tokens(request)
    room = min(len(request.block_table) * size, request.num_tokens + num_drafts)
    if covered is not None:
        room = min(room, covered)
        blocks.cover(request, room)
    return room - request.num_tokens
