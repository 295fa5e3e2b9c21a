"""A worker that speaks the session protocol over a real socket and does what a test's script says.

It has no model: its tokens are a function of (prompt, seed, choice, position), as real sampling noise is, so that a
continued stream can be told from a disturbed one.
"""

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from tandem.protocol.session_versions import SPOKEN
from tandem.protocol.wire import finish_reason_to_pb, prompt_from_pb
from tandem.rpc.cluster_grpc import ClusterAuth, listen, make_server
from tandem.rpc.framed_connection import FramedConnection
from tandem.v1 import common_pb2 as common
from tandem.v1 import session_pb2 as pb
from tandem.v1.session_pb2_grpc import WorkerServicer, add_WorkerServicer_to_server
from tandem.values.outputs import FinishReason
from tandem.values.roles import WorkerRole
from worker.direct_port import DirectPort
from worker.session_port import orders_of

SECRET = b"a secret of the test cluster"
VOCAB = 997


def expected_tokens(prompt: Sequence[int], *, count: int, seed: int = 0, choice: int = 0, start: int = 0) -> list[int]:
    """What any fake worker generates at output positions `start` to `count` - 1."""
    root = sum(prompt) + 31 * seed + 101 * choice
    return [(root + 17 * position * position) % VOCAB for position in range(start, count)]


class Submission:
    """One attempt as the worker sees it, with the ways to answer it."""

    def __init__(self, submit: pb.Submit, send: Callable[[pb.WorkerMessage], None]) -> None:
        if submit.prompt:
            # Readers here need not care which version of the session it is.
            submit.prompt_token_ids.extend(prompt_from_pb(submit))
        self.submit = submit
        self.cancelled = asyncio.Event()
        self.reroutes: asyncio.Queue[pb.Reroute] = asyncio.Queue()
        self._send = send

    @property
    def tokens(self) -> list[int]:
        """All tokens that the attempt has still to give."""
        submit = self.submit
        return expected_tokens(
            submit.prompt_token_ids,
            count=submit.sampling.max_tokens,
            seed=submit.sampling.seed,
            choice=submit.choice_index,
            start=len(submit.generated_token_ids),
        )

    def give(
        self,
        tokens: Sequence[int],
        *,
        first_index: int | None = None,
        finish: FinishReason | None = None,
        cached: int | None = None,
        attempt: int | None = None,
        prediction: tuple[int, int] | None = None,
    ) -> None:
        """Send tokens, by default from where the attempt began; one that comes with nothing else goes in columns."""
        begins_at = len(self.submit.generated_token_ids)
        if len(tokens) == 1 and (first_index or 0) > begins_at and finish is cached is attempt is prediction is None:
            step = pb.StepTokens(handles=[self.submit.handle], indexes=[first_index or 0], token_ids=tokens)
            self._send(pb.WorkerMessage(tokens=step))
            return
        delta = pb.TokenDelta(
            request_id=self.submit.request_id,
            attempt=self.submit.attempt if attempt is None else attempt,
            first_index=begins_at if first_index is None else first_index,
            token_ids=tokens,
        )
        if cached is not None:
            delta.started.CopyFrom(pb.Started(cached_tokens=cached, times=common.PhaseTimes(prefill_s=0.25)))
        if prediction is not None:
            delta.prediction.CopyFrom(pb.PredictionUse(accepted=prediction[0], rejected=prediction[1]))
        if finish is not None:
            times = common.PhaseTimes(prefill_s=0.25, decode_s=0.5)
            failure = common.Failure(code="InternalError", message="boom") if finish is FinishReason.ERROR else None
            delta.finish.CopyFrom(
                pb.Finish(reason=finish_reason_to_pb(finish), cached_tokens=7, times=times, failure=failure)
            )
        self._send(pb.WorkerMessage(tokens=pb.StepTokens(deltas=[delta])))

    def commit_handoff(self, *, num_tokens: int, exposed_s: float) -> None:
        """Report that the KV has come from the prefill worker of the route."""
        route = self.submit.prefill
        handoff = pb.CommittedHandoff(
            worker_id=route.worker_id, incarnation=route.incarnation, num_tokens=num_tokens, exposed_s=exposed_s
        )
        self._send(pb.WorkerMessage(tokens=pb.StepTokens(handoffs=[handoff])))

    def give_all(self, *, cached: int | None = None) -> None:
        """Everything at once, with a normal end."""
        self.give(self.tokens, finish=FinishReason.LENGTH, cached=cached)

    def refuse(self, code: str, message: str = "no", retry_after_s: float | None = None) -> None:
        """Refuse with a class of tandem.errors."""
        failure = common.Failure(code=code, message=message, retry_after_s=retry_after_s)
        refused = pb.Refused(request_id=self.submit.request_id, attempt=self.submit.attempt, failure=failure)
        self._send(pb.WorkerMessage(refused=refused))

    def fail_transfer(self, transfer_id: str | None = None, code: str | None = None) -> None:
        """Report that the hand-off ended without a commit; `code`: what the prefill worker refused it with."""
        failed = pb.TransferFailed(
            request_id=self.submit.request_id,
            attempt=self.submit.attempt,
            transfer_id=self.submit.prefill.transfer_id if transfer_id is None else transfer_id,
            reason="the peer was lost",
            failure=None if code is None else common.Failure(code=code, message="no"),
        )
        self._send(pb.WorkerMessage(transfer_failed=failed))


class ScoringAttempt:
    """One prompt to score as the worker sees it, with the ways to answer it."""

    def __init__(self, order: pb.ScorePrompt, send: Callable[[pb.WorkerMessage], None]) -> None:
        self.order = order
        self.cancelled = asyncio.Event()
        self._send = send

    def give(
        self, begin: int = 0, end: int | None = None, *, scale: float = 1.0, rank: int | None = None, first_top: int = 0
    ) -> None:
        """Scores of the tokens behind the first, each minus its id; or their mean. `end`: not all of them yet.

        `rank`: that of all, in place of their positions; `first_top`: the likeliest token.
        """
        order, prompt = self.order, self.order.prompt_token_ids[1:]
        part = pb.PromptScores(request_id=order.request_id, attempt=order.attempt)
        if order.HasField("num_top"):
            scored = prompt[begin:end]
            part.logprobs.extend(-scale * token for token in scored)
            part.ranks.extend(rank or position for position in range(begin + 1, begin + 1 + len(scored)))
            part.top_ids.extend(first_top + top for _ in scored for top in range(order.num_top))
            part.top_logprobs.extend(-float(top) for _ in scored for top in range(order.num_top))
        elif end is None:
            part.mean.extend([float(len(prompt) + 1), 3.0, 4.0])
        if end is None:
            part.times.CopyFrom(common.PhaseTimes(prefill_s=0.25))
        self._send(pb.WorkerMessage(prompt_scores=part))

    def refuse(self, code: str, retry_after_s: float | None = None) -> None:
        """Refuse with a class of tandem.errors."""
        failure = common.Failure(code=code, message="no", retry_after_s=retry_after_s)
        order = self.order
        refused = pb.Refused(request_id=order.request_id, attempt=order.attempt, failure=failure)
        self._send(pb.WorkerMessage(refused=refused))


Script = Callable[[Submission], Awaitable[None]]


async def answer(submission: Submission) -> None:
    """The script of a healthy worker: one message per token."""
    tokens, start = submission.tokens, len(submission.submit.generated_token_ids)
    for offset, token in enumerate(tokens):
        last = offset == len(tokens) - 1
        submission.give(
            [token],
            first_index=start + offset,
            finish=FinishReason.LENGTH if last else None,
            cached=3 if offset == 0 else None,
        )
        await asyncio.sleep(0)


class FakeWorker(WorkerServicer):
    """One worker; an async context manager that serves while inside."""

    def __init__(
        self,
        worker_id: str,
        *,
        role: WorkerRole = WorkerRole.DECODE,
        script: Script = answer,
        incarnation: int = 1,
        num_blocks: int = 64,
        model_fingerprint: str = "model-a",
        port: int = 0,
        is_direct: bool = True,
    ) -> None:
        """`is_direct`: sessions go on over a connection of their own; else they stay with gRPC."""
        self.worker_id = worker_id
        self.role = role
        self.script = script
        self.load_period_s = 0.0
        """The period of load reports that the router asked for in its newest session."""
        self.hello = pb.WorkerHello(
            protocol_version=SPOKEN.oldest,
            newest_version=SPOKEN.newest,
            worker_id=worker_id,
            incarnation=incarnation,
            role=pb.WORKER_ROLE_DECODE if role is WorkerRole.DECODE else pb.WORKER_ROLE_PREFILL,
            model_name="toy",
            max_model_len=1024,
            num_blocks=num_blocks,
            layout=common.KVLayout(
                model_fingerprint=model_fingerprint,
                dtype="float32",
                num_layers=2,
                num_kv_heads=2,
                head_dim=8,
                block_size=16,
                tp_size=1,
            ),
            handoff_address=f"{worker_id}:1" if role is WorkerRole.PREFILL else "",
            transports=["tcp"],
        )
        self.first_messages: list[pb.WorkerMessage] = []
        """Sent on each session right after HELLO, and again when asked for the whole prefix cache."""
        self.num_resyncs = 0
        self.num_superseded = 0  # sessions whose router said that its earlier ones are over
        self.submissions: asyncio.Queue[Submission] = asyncio.Queue()  # every submit that arrived, in order
        self.scorings: asyncio.Queue[ScoringAttempt] = asyncio.Queue()
        self.scoring_script: Callable[[ScoringAttempt], None] = ScoringAttempt.give
        self.adoptions: asyncio.Queue[pb.TakeOver] = asyncio.Queue()
        """Every wish of a router to take a stream over, in order."""
        self.keeps: dict[str, list[int]] = {}
        """Answers, whole, that a router may take over; others are refused."""
        self.port = port
        self.num_direct = 0  # sessions that went on over a connection of their own
        self._is_direct = is_direct
        self._server: grpc.aio.Server | None = None
        self._direct: DirectPort | None = None
        self._direct_sessions: set[_DirectSession] = set()
        self._outgoing: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self._live: dict[str, Submission | ScoringAttempt] = {}
        """The latest attempt at each choice."""
        self._attempts: dict[tuple[str, int], Submission | ScoringAttempt] = {}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> "FakeWorker":
        await self.start()
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.crash()

    async def start(self) -> None:
        """Serve, on the same port as before if there was one."""
        self._server = make_server(ClusterAuth(SECRET))
        add_WorkerServicer_to_server(self, self._server)
        self.port = listen(self._server, "127.0.0.1", self.port)
        if self._is_direct:
            self._direct = await DirectPort("127.0.0.1", None).__aenter__()
        await self._server.start()

    async def crash(self) -> None:
        """Close every connection at once, as the kernel does for a killed process."""
        if self._server is not None:
            server, self._server = self._server, None
            direct, self._direct = self._direct, None
            for session in self._direct_sessions:
                session.connection.abort()
            # A script that crashes its own worker is cancelled meanwhile.
            await asyncio.shield(asyncio.ensure_future(_close(server, direct)))

    def send(self, message: pb.WorkerMessage) -> None:
        """Send on the open session."""
        self._outgoing.put_nowait(message)

    def submission(self, request_id: str) -> Submission:
        """Return the submission of a request that has not ended."""
        found = self._live[request_id]
        assert isinstance(found, Submission)
        return found

    async def Session(self, request_iterator: Any, context: Any) -> None:
        first = await context.read()
        assert first.HasField("hello")
        self.load_period_s = first.hello.load_period_s
        # Before the router can know this worker: what a test sends from then on must not go to an earlier session.
        outgoing = self._outgoing = asyncio.Queue()
        if self._direct is None or not first.hello.direct:
            await context.write(pb.WorkerMessage(hello=self.hello))
            await self._serve(context.read, context.write, outgoing)
            return
        session = _DirectSession()
        ticket = self._direct.offer(session.start)
        hello = pb.WorkerMessage(hello=self.hello)
        hello.hello.direct_port, hello.hello.direct_ticket = self._direct.port, ticket
        await context.write(hello)
        await session.has_begun.wait()
        self.num_direct += 1
        session.serving = asyncio.create_task(self._serve(session.read, session.write, outgoing))
        self._direct_sessions.add(session)
        session.serving.add_done_callback(lambda _: self._direct_sessions.discard(session))

    async def _serve(
        self,
        read: Callable[[], Awaitable[Any]],
        write: Callable[[pb.WorkerMessage], Awaitable[None]],
        outgoing: asyncio.Queue[pb.WorkerMessage],
    ) -> None:
        for message in self.first_messages:
            await write(message)
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(self._write(outgoing, write))
            scripts = []
            while isinstance(message := await read(), pb.RouterMessage):
                for order in orders_of(message):
                    scripts += self._take(order, tasks)
            for task in (writer, *scripts):
                task.cancel()

    def _take(self, message: pb.RouterMessage, tasks: asyncio.TaskGroup) -> list[asyncio.Task[Any]]:
        match message.WhichOneof("kind"):
            case "submit":
                submission = Submission(message.submit, self.send)
                self._begin(submission, message.submit)
                self.submissions.put_nowait(submission)
                return [tasks.create_task(self.script(submission))]
            case "score_prompt":
                scoring = ScoringAttempt(message.score_prompt, self.send)
                self._begin(scoring, message.score_prompt)
                self.scorings.put_nowait(scoring)
                self.scoring_script(scoring)
            case "take_over":
                self._give_away(message.take_over)
            case "cancel":
                if found := self._attempts.get((message.cancel.request_id, message.cancel.attempt)):
                    found.cancelled.set()
            case "reroute":
                self._live[message.reroute.request_id].reroutes.put_nowait(message.reroute)
            case "end_earlier_sessions":
                self.num_superseded += 1
            case "resync":
                self.num_resyncs += 1
                for answer in self.first_messages:
                    self.send(answer)
        return []

    def _begin(self, attempt: "Submission | ScoringAttempt", order: pb.Submit | pb.ScorePrompt) -> None:
        self._live[order.request_id] = self._attempts[order.request_id, order.attempt] = attempt

    def _give_away(self, adopt: pb.TakeOver) -> None:
        self.adoptions.put_nowait(adopt)
        submission = Submission(pb.Submit(request_id=adopt.request_id, attempt=adopt.attempt), self.send)
        if adopt.request_id in self.keeps and (kept := self._live.get(adopt.request_id)) is not None:
            # The attempt goes on under its new number.
            self._attempts = {name: found for name, found in self._attempts.items() if found is not kept}
        self._begin(submission, submission.submit)
        if adopt.request_id in self.keeps:
            submission.give(self.keeps[adopt.request_id], finish=FinishReason.LENGTH, cached=3)
        else:
            submission.refuse("Unavailable")

    async def _write(
        self, outgoing: asyncio.Queue[pb.WorkerMessage], write: Callable[[pb.WorkerMessage], Awaitable[None]]
    ) -> None:
        while True:
            await write(await outgoing.get())


async def _close(server: grpc.aio.Server, direct: DirectPort | None) -> None:
    await server.stop(None)
    if direct is not None:
        await direct.close()


class _DirectSession:
    """A session's own connection, read and written like a call."""

    serving: asyncio.Task[None]
    connection: FramedConnection

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()
        self._read: asyncio.Queue[pb.RouterMessage | None] = asyncio.Queue()
        self._written: deque[pb.WorkerMessage] = deque()

    def start(self, connection: FramedConnection) -> "_DirectSession":
        self.connection = connection
        self.has_begun.set()
        return self

    async def read(self) -> pb.RouterMessage | None:
        return await self._read.get()

    async def write(self, message: pb.WorkerMessage) -> None:
        self._written.append(message)
        self.connection.wake()

    def next_frame(self) -> bytes | None:
        return self._written.popleft().SerializeToString() if self._written else None

    def on_frame(self, frame: bytes) -> None:
        self._read.put_nowait(pb.RouterMessage.FromString(frame))

    def on_lost(self, error: Exception | None) -> None:
        self._read.put_nowait(None)


async def hold(_: Submission) -> None:
    """The script of a worker that never answers."""


async def _serve_until_killed() -> None:
    async with FakeWorker("d0", script=hold) as worker:
        sys.stdout.write(f"{worker.port}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve_until_killed())
