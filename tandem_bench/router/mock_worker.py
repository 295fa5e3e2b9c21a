"""`python -m tandem_bench.router.mock_worker ...`: a decode worker without a model, for measuring the router's cost.

It speaks the session protocol with the workers' own classes, and like a real worker it reports the blocks that it has
computed. Each "engine step" gives every live request one token, in one message, or holds tokens back until there are as
many as the router wants to receive together; or all tokens of a request at once, with `--step-ms 0`.
"""

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tandem.config.cluster_tls import ClusterTls
from tandem.errors import Unavailable
from tandem.protocol.session_versions import SPOKEN
from tandem.protocol.wire import failure_to_pb, finish_reason_to_pb, prompt_from_pb
from tandem.rpc.cluster_credentials import open_credentials
from tandem.rpc.cluster_grpc import ClusterAuth, make_server, open_port
from tandem.v1 import common_pb2 as common
from tandem.v1 import session_pb2 as pb
from tandem.v1.session_pb2_grpc import add_WorkerServicer_to_server
from tandem.values.block_hash import HASH_BLOCK_TOKENS, BlockHasher
from tandem.values.ids import BlockHash, Incarnation
from tandem.values.outputs import FinishReason
from worker.direct_port import open_direct_port
from worker.session_port import EventSink, SessionPort
from worker.sessions import WorkerSessions

NUM_BLOCKS = 1 << 16
MAX_MODEL_LEN = 1 << 14


@dataclass(slots=True)
class _Running:
    port: SessionPort
    submit: pb.Submit
    num_tokens: int
    """Tokens of the answer so far, those of an earlier attempt included."""
    num_told: int
    has_begun: bool = False


class MockWorker:
    """Handles the sessions of one decode worker (SessionHandler)."""

    def __init__(
        self, *, index: int, vocab_size: int, model_name: str, step_s: float, token_ids: Iterable[int], secret: bytes
    ) -> None:
        """`token_ids`: the tokens that every answer repeats."""
        self._hasher = BlockHasher(secret)
        self._cached: set[BlockHash] = set()
        self._num_events = 0
        self._index = index
        self._vocab_size = vocab_size
        self._model_name = model_name
        self._step_s = step_s
        self._says = list(token_ids)
        self._running: dict[tuple[SessionPort, str], _Running] = {}
        self._has_work = asyncio.Event()
        self.sinks: Callable[[], Iterable[EventSink]] = tuple
        """Who is told of changes of the prefix cache."""
        self.is_draining = False
        """Whether new requests are refused."""

    @property
    def num_running(self) -> int:
        return len(self._running)

    def hello(self) -> pb.WorkerHello:
        """Return the hello of a worker with unlimited room."""
        layout = common.KVLayout(
            model_fingerprint="mock",
            dtype="bfloat16",
            num_layers=1,
            num_kv_heads=1,
            head_dim=8,
            block_size=HASH_BLOCK_TOKENS,
            tp_size=1,
        )
        return pb.WorkerHello(
            protocol_version=SPOKEN.oldest,
            newest_version=SPOKEN.newest,
            worker_id=f"decode-{self._index}",
            incarnation=Incarnation(self._index + 1),
            role=pb.WORKER_ROLE_DECODE,
            model_name=self._model_name,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=NUM_BLOCKS,
            layout=layout,
            vocab_size=self._vocab_size,
        )

    def opened(self, port: SessionPort) -> None:
        if port.wants_events:
            self.send_snapshot(port)

    def send_snapshot(self, sink: EventSink) -> None:
        sink.send_snapshot(self._num_events, [pb.KVEvent(block_hash=name, stored=True) for name in self._cached])

    def order(self, port: SessionPort, message: pb.RouterMessage) -> None:
        kind = message.WhichOneof("kind")
        if kind == "submit" and self.is_draining:
            failure = failure_to_pb(Unavailable("this worker is draining"))
            refused = pb.Refused(request_id=message.submit.request_id, attempt=message.submit.attempt, failure=failure)
            port.send(pb.WorkerMessage(refused=refused))
        elif kind == "submit":
            num_known = len(message.submit.generated_token_ids)
            self._running[port, message.submit.request_id] = _Running(
                port=port, submit=message.submit, num_tokens=num_known, num_told=num_known
            )
            self._compute(message.submit)
            self._has_work.set()
            if not self._step_s:
                self._step()
        elif kind == "resync":
            self.send_snapshot(port)
        elif kind == "cancel":
            self._running.pop((port, message.cancel.request_id), None)

    def closed(self, port: SessionPort) -> None:
        """End the requests of a session."""
        self._running = {key: one for key, one in self._running.items() if one.port is not port}

    async def load(self) -> pb.LoadSnapshot:
        """Return the load of a fast worker that is nearly idle."""
        return pb.LoadSnapshot(
            num_running=len(self._running),
            num_free_blocks=NUM_BLOCKS,
            num_total_blocks=NUM_BLOCKS,
            prefill_tokens_per_s=1e5,
            decode_step_s=0.01,
        )

    async def run(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            while self._step_s and self._running:
                await asyncio.sleep(self._step_s)
                self._step()

    def _compute(self, submit: pb.Submit) -> None:
        """Compute a prompt in no time; new blocks are cached and reported."""
        names: list[BlockHash] = []
        self._hasher.extend(BlockHash(submit.hash_root), names, prompt_from_pb(submit))
        fresh = [name for name in names if name not in self._cached]
        if fresh:
            for sink in self.sinks():
                sink.send_events(self._num_events, [pb.KVEvent(block_hash=name, stored=True) for name in fresh])
            self._cached.update(fresh)
            self._num_events += len(fresh)

    def _step(self) -> None:
        steps: dict[SessionPort, pb.StepTokens] = {}
        for key, one in list(self._running.items()):
            wanted = one.submit.sampling.max_tokens
            one.num_tokens = one.num_tokens + 1 if self._step_s else wanted
            is_over = one.num_tokens >= wanted
            if is_over:
                del self._running[key]
            if (step := steps.get(one.port)) is None:
                step = steps[one.port] = pb.StepTokens()
            if is_over or not one.has_begun:
                step.deltas.append(self._delta(one, is_over=is_over))
            elif one.submit.handle and one.submit.tokens_per_message <= 1:
                step.handles.append(one.submit.handle)
                step.indexes.append(one.num_told)
                step.token_ids.append(self._says[one.num_told % len(self._says)])
                one.num_told = one.num_tokens
            elif one.num_tokens - one.num_told >= one.submit.tokens_per_message:
                step.deltas.append(self._delta(one, is_over=False))
        for port, step in steps.items():
            if step.deltas or step.handles:
                port.send(pb.WorkerMessage(tokens=step))

    def _delta(self, one: _Running, *, is_over: bool) -> pb.TokenDelta:
        first, one.num_told = one.num_told, one.num_tokens
        delta = pb.TokenDelta(
            request_id=one.submit.request_id,
            attempt=one.submit.attempt,
            first_index=first,
            token_ids=[self._says[i % len(self._says)] for i in range(first, one.num_tokens)],
        )
        if not one.has_begun:
            one.has_begun = True
            delta.started.CopyFrom(pb.Started())
        if is_over:
            delta.finish.CopyFrom(pb.Finish(reason=finish_reason_to_pb(FinishReason.LENGTH)))
        return delta


async def _serve(options: argparse.Namespace) -> None:
    worker = MockWorker(
        index=options.index,
        vocab_size=options.vocab_size,
        model_name=options.model,
        step_s=options.step_ms / 1e3,
        token_ids=options.says,
        secret=options.secret.encode(),
    )
    server = make_server(ClusterAuth(options.secret.encode()))
    tls = ClusterTls(pem=None if options.pem is None else options.pem.read_text())
    credentials, listening = open_credentials(tls, ()), AsyncExitStack()
    direct = None if options.grpc else await open_direct_port(listening, "127.0.0.1", credentials)
    sessions = WorkerSessions(worker, direct=direct)
    worker.sinks = lambda: sessions.event_sinks
    add_WorkerServicer_to_server(sessions, server)  # type: ignore[no-untyped-call]
    await open_port(listening, server, "127.0.0.1", options.port, credentials)
    await server.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(sessions.send_loads())
        tasks.create_task(worker.run())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tandem_bench.router.mock_worker", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--model", default="mock")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--pem", type=Path, help="a certificate of cluster.tls, as in cluster.tls.pem")
    parser.add_argument("--grpc", action="store_true", help="sessions stay with gRPC")
    parser.add_argument("--says", type=int, nargs="+", default=[5, 6, 7])
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
