"""Descriptions of moves, for counterexamples."""

from tests.proofs.explore.model.environment import Environment, Move
from tests.proofs.explore.model.life import DECODE, Write

WORKERS = ("prefill worker p", "prefill worker q", "the decode worker")

_VERBS = {
    "deliver": "gets",
    "lose": "never gets",
    "repeat": "gets, and will get again,",
    "bend": "gets, forged,",
}


class Broken(AssertionError):
    """Raised when a property does not hold, with the shortest way there."""

    def __init__(self, what: str, trace: list[str]) -> None:
        lines = [f"{i:3}. {line}" for i, line in enumerate(trace, 1)]
        super().__init__("\n".join([what, *lines]))
        self.what = what
        self.trace = trace


def words(environment: Environment, move: Move) -> str:
    """One move, as a person would say it."""
    match move:
        case ("deliver" | "lose" | "repeat" | "bend", to, number):
            envelope = environment.names.envelopes.values[number]
            sender = "the decode worker" if to != DECODE else WORKERS[environment.names.at(envelope.incarnation)]
            detail = "".join(
                f" {name} {getattr(envelope.body, name)}"
                for name in ("seq", "rewrite", "num_units", "num_chunks")
                if hasattr(envelope.body, name)
            )
            body = type(envelope.body).__name__.upper()
            return f"{WORKERS[to]} {_VERBS[move[0]]} {body}{detail} of attempt {envelope.key.attempt} from {sender}"
        case ("land" | "damage" | "written", Write() as write):
            done = {"land": "land", "damage": "land damaged", "written": "are reported written"}[move[0]]
            chunk = f"chunk {write.seq} (rewrite {write.rewrite}) of attempt {write.attempt}"
            return f"the bytes of {chunk} {done} in blocks {sorted({block for block, _ in write.slots})}"
        case ("bind", attempt, blocks):
            return f"attempt {attempt} is given blocks {list(blocks)}"
        case ("expire", side, which):
            return f"a lease of {WORKERS[which] if side == 'sender' else f'attempt {which}'} ends on the {side}'s side"
        case ("begin", at):
            return f"the router names {WORKERS[at]}"
        case ("cut", at):
            return f"the link to {WORKERS[at]} ends"
        case ("crash" | "hang" | "engine" | "engine fails" | "deadline" | "preempt", at):
            verb = {"crash": "crashes and restarts", "hang": "is replaced while its old process hangs"}
            verb |= {"engine": "computes on", "deadline": "runs out of time", "engine fails": "gives the prompt up"}
            verb |= {"preempt": "begins the prompt again in other blocks"}
            return f"{WORKERS[at]} {verb.get(move[0], move[0])}"
        case _:
            return " ".join(map(str, move))
