"""Scores a quality gate's text with a worker's own engine, in the way of routers' orders, before the worker serves."""

import logging
import secrets
import time
from pathlib import Path
from typing import Protocol

from tandem.config.cluster import ClusterConfig
from tandem.config.source.regular_file import read_regular_text
from tandem.errors import ConfigError
from tandem.model_path import model_directory
from tandem.protocol.wire import failure_from_pb
from tandem.v1 import session_pb2 as pb
from tandem.values.block_hash import HASH_BYTES
from tandem.values.ids import Incarnation
from tandem.values.roles import WorkerRole
from worker.decisions.quality_gate import MAX_GATE_BYTES, QualityGate, WindowScores, quality_loss, scheme_of
from worker.engine_host import EngineHost
from worker.session_port import SessionPort

_log = logging.getLogger(__name__)
_SETTING = "engine.quality_gate"


class OrderHandler(Protocol):
    """A worker, as its sessions see it."""

    def order(self, port: SessionPort, message: pb.RouterMessage) -> None: ...


class QualityCheck:
    """The check of one worker, at its start."""

    def __init__(self, gate: QualityGate, *, quantization: str, where: str) -> None:
        """`quantization`: the worker's `engine.quantization`; `where`: what errors begin with."""
        self._gate = gate
        self._quantization = quantization
        self._where = where

    @classmethod
    def from_config(cls, config: ClusterConfig, role: WorkerRole) -> "QualityCheck | None":
        """Read the gate of a worker; None without one. Raises ConfigError that names the setting and the file."""
        engine = config.engine_of(config.prefill if role is WorkerRole.PREFILL else config.decode)
        if engine.quality_gate is None:
            return None
        folder = model_directory(config.model.path)
        path = (folder if folder.is_dir() else folder.parent) / Path(engine.quality_gate).expanduser()
        try:
            gate = QualityGate.parse(read_regular_text(path, max_bytes=MAX_GATE_BYTES))
        except ConfigError as error:
            wrong = str(error)
            raise ConfigError(f"{_SETTING}: {wrong if wrong.startswith(str(path)) else f'{path}: {wrong}'}") from None
        return cls(gate, quantization=engine.quantization, where=f"{_SETTING}: {path}")

    @property
    def num_tokens(self) -> int:
        """Number of tokens to score."""
        return sum(len(window.logprobs) for window in self._gate.windows)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise ConfigError where the gate is of a model with another vocabulary."""
        if vocab_size != self._gate.vocab_size:
            raise ConfigError(
                f"{self._where}: made for a vocabulary of {self._gate.vocab_size} tokens, the model has {vocab_size}"
            )

    async def run(self, host: EngineHost, worker: OrderHandler) -> None:
        """Score the text. Raises ConfigError where the loss is beyond the limit of the weights' scheme, and where the
        text cannot be scored.
        """
        model, began_s = host.parts.model, time.monotonic()
        self.check_vocabulary(model.vocab_size)
        loss = quality_loss(self._gate, await self._scores(worker))
        scheme = scheme_of(self._quantization, model.weight_format)
        if not loss.is_within(scheme):
            raise ConfigError(f"{self._where}: {loss.render(scheme)}")
        _log.info("quality gate passed in %.1f s: %s", time.monotonic() - began_s, loss.render(scheme))

    async def _scores(self, worker: OrderHandler) -> list[WindowScores]:
        """Order all windows at once, so that the scheduler batches them, and wait for the last."""
        port = SessionPort(Incarnation(0), wants_events=False)
        # Of its own, so that no client's prompt finds these tokens in the prefix cache.
        root = secrets.token_bytes(HASH_BYTES)
        for index, window in enumerate(self._gate.windows):
            order = pb.ScorePrompt(
                request_id=str(index), attempt=1, prompt_token_ids=window.token_ids, num_top=1, hash_root=root
            )
            worker.order(port, pb.RouterMessage(score_prompt=order))
        parts: list[list[pb.PromptScores]] = [[] for _ in self._gate.windows]
        num_left = len(parts)
        while num_left:
            if (message := await port.next()) is None:
                raise ConfigError(f"{self._where}: has more windows than a worker can answer at once")
            if message.HasField("refused"):
                refused = message.refused
                why = failure_from_pb(refused.failure).message
                raise ConfigError(f"{self._where}: windows.{refused.request_id}: {why}")
            parts[int(message.prompt_scores.request_id)].append(message.prompt_scores)
            num_left -= message.prompt_scores.HasField("times")
        return [
            WindowScores(
                logprobs=[logprob for part in found for logprob in part.logprobs],
                top_ids=[top_id for part in found for top_id in part.top_ids],
            )
            for found in parts
        ]
