"""Attributes a task's time to phases that do not overlap, so that their sum is at most the task's lifetime.

Prompt computed here: fetch (reported as transfer), queue, prefill, decode. Prompt computed elsewhere: reservation
(reported as decode queue), the prefill worker's queue and prefill, exposed transfer, the wait for the engine (decode
queue), decode. Times in the network and between threads belong to no phase. Functions change tasks, and get the time.
"""

from decode_worker.task import DecodeTask
from engine.types.step_output import AdmittedSequence
from kv_transfer.protocol.messages import FirstToken
from tandem.values.outputs import PhaseTimes


def fetched(task: DecodeTask, num_tokens: int, seconds: float) -> None:
    """Record a fetch from a peer before the prompt was queued here."""
    task.fetched_tokens = num_tokens
    task.times = task.times._replace(transfer_s=task.times.transfer_s + seconds)


def admitted(task: DecodeTask, admission: AdmittedSequence) -> None:
    """Record that the task left this worker's queue."""
    times = task.times
    queued_s = max(0.0, admission.queued_s - times.transfer_s - times.decode_queue_s)
    task.times = times._replace(prefill_queue_s=queued_s, cached=admission.cached(task.fetched_tokens))


def computed_here(task: DecodeTask, now_s: float) -> None:
    """Record that the first token was sampled here."""
    times = task.times
    before_s = times.prefill_queue_s + times.transfer_s + times.decode_queue_s
    task.times = times._replace(prefill_s=max(0.0, now_s - task.arrived_s - before_s))
    task.decoding_since_s = now_s


def first_token_came(task: DecodeTask, first_token: FirstToken, now_s: float) -> None:
    """Record a first token sampled elsewhere; that worker's own times come with the commit, if there is one."""
    waited_s = now_s - task.arrived_s - task.times.decode_queue_s
    task.times = task.times._replace(prefill_s=max(0.0, waited_s), cached=first_token.cached)
    task.decoding_since_s = now_s


def landed(task: DecodeTask, times: PhaseTimes, now_s: float) -> None:
    """Record that all KV is here, with the prefill worker's own times."""
    cached = task.times.cached if task.first_token is not None else times.cached
    task.times = times._replace(decode_queue_s=task.times.decode_queue_s, cached=cached)
    task.decoding_since_s = now_s


def entered(task: DecodeTask, now_s: float) -> None:
    """Record that the engine has the landed sequence."""
    queue_s = task.times.decode_queue_s + now_s - task.decoding_since_s
    task.times = task.times._replace(decode_queue_s=queue_s)
    task.decoding_since_s = now_s


def final(task: DecodeTask, now_s: float, *, block_bytes: int) -> PhaseTimes:
    """Phase times of a finished request."""
    decode_s = now_s - task.decoding_since_s if task.decoding_since_s else 0.0
    held_s = task.request.held.until(now_s)
    return task.times._replace(decode_s=decode_s, kv_byte_s=task.times.kv_byte_s + held_s * block_bytes)
