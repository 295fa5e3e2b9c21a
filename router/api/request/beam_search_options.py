"""Parses and checks beam search options: they exclude parameters that change the distribution."""

from typing import Literal

from msgspec.structs import replace

from router.api.request.client_request import ClientRequest, PreparedRequest
from router.types.requests import BeamSearchParams
from tandem.errors import InvalidRequest
from tandem.values.sampling import MAX_CONTINUATIONS, SamplingParams

_PARAM = "use_beam_search"
_MOST_PENALTY = 10.0
_HARMLESS = frozenset({"max_tokens", "seed", "temperature", "stop_token_ids", "ignore_eos", "num_logprobs"})
_NEUTRAL = SamplingParams()


def parse_beam_search(
    *,
    wanted: bool,
    width: int,
    length_penalty: float | None,
    early_stopping: bool | Literal["never"] | None,
    streams: bool,
    votes: bool,
) -> BeamSearchParams | None:
    """Parse the options; None: no beam search. `with_beams` adds the tokens that end a beam. Raises InvalidRequest."""
    penalty = 1.0 if length_penalty is None else length_penalty
    if not wanted:
        if penalty != 1.0:
            raise InvalidRequest("length_penalty needs use_beam_search: true", param="length_penalty")
        if early_stopping not in (None, False):
            raise InvalidRequest("early_stopping needs use_beam_search: true", param="early_stopping")
        return None
    if streams:
        raise InvalidRequest(f"{_PARAM} cannot be streamed: the best answers are known only at the end", param=_PARAM)
    if votes:
        raise InvalidRequest(f"{_PARAM} cannot be combined with vote", param=_PARAM)
    if not -_MOST_PENALTY <= penalty <= _MOST_PENALTY:
        bound = f"length_penalty must be a number in [-{_MOST_PENALTY:g}, {_MOST_PENALTY:g}]"
        raise InvalidRequest(bound, param="length_penalty")
    return BeamSearchParams(num_beams=width, length_penalty=penalty, early_stopping=early_stopping or False)


def with_beams(one: PreparedRequest, fields: ClientRequest, *, most_beams: int) -> PreparedRequest:
    """Add the requested beam search, if any. Raises InvalidRequest for options that it does not support."""
    if (beams := fields.beams) is None:
        return one
    if not fields.num_choices <= beams.num_beams <= most_beams:
        raise InvalidRequest(f"best_of: beams must be at least n and at most {most_beams}", param="best_of")
    sampling = one.request.sampling
    compared = zip(SamplingParams._fields, sampling, _NEUTRAL, strict=True)
    changed = [name for name, own, neutral in compared if name not in _HARMLESS and own != neutral]
    if sampling.temperature not in (0.0, 1.0):
        changed.append("temperature")
    changed += ["stop"] if fields.stop else []
    changed += ["tools"] if one.calling is not None else []
    if changed:
        raise InvalidRequest(f"{changed[0]} cannot be combined with {_PARAM}", param=changed[0])
    beams = replace(beams, end_ids=one.stop_token_ids)
    if beams.num_next > MAX_CONTINUATIONS:
        reason = f"beams x (1 + tokens that end an answer) is {beams.num_next}; at most {MAX_CONTINUATIONS}"
        raise InvalidRequest(f"{_PARAM}: {reason}", param=_PARAM)
    return replace(one, request=replace(one.request, beams=beams))
