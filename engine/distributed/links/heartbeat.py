"""Heartbeats between the ranks of a group that spans nodes: a request every few seconds.

A process that dies closes its connections; a machine or a network that freezes closes nothing. So each rank asks rank 0
over a connection of its own, and an end that receives nothing for `SILENCE_S` gives the other up. The same connection
carries the rendezvous of the ranks.
"""

import json
import logging
import os
import threading
from collections.abc import Callable

from engine.distributed.links.channel import ChannelKind, RankChannel
from engine.distributed.links.lost import RankLost
from engine.distributed.links.rendezvous import RemoteKeys, RendezvousStore

_log = logging.getLogger(__name__)
PULSE_S = 2.0
SILENCE_S = 20.0
"""Silence after which the other end counts as lost: many times the pauses of a process that loads torch or a model."""
START_S = 120.0
"""Time that a process may take to start, most of it for importing torch."""
_EXIT_S = 1.0
"""Time that a rank has to end by itself, once it has noticed the end on its other connection."""


class Pulse:
    """Sends a rank's heartbeats for as long as the process lives."""

    def __init__(
        self, channel: RankChannel, *, silence_s: float = SILENCE_S, end_process: Callable[[int], object] = os._exit
    ) -> None:
        self.keys = RemoteKeys(channel, silence_s=silence_s)
        self._end_process = end_process
        self._never = threading.Event()
        threading.Thread(target=self._run, name="tandem-pulse", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self.keys.pulse()
                self._never.wait(PULSE_S)
        except RankLost as lost:
            # A thread in a collective would wait for a dead rank for ever. An orderly end comes before this exit.
            self._never.wait(_EXIT_S)
            _log.warning("%s: ending this rank", lost)
            self._end_process(1)


class HeartbeatServer:
    """Answers heartbeats on rank 0, with one thread for each other rank."""

    def __init__(
        self, on_lost: Callable[[RankLost], None], *, silence_s: float = SILENCE_S, start_s: float = START_S
    ) -> None:
        """`on_lost` is called with the first lost rank, on one of the threads; not after `hang_up` or `close`.

        `start_s`: longest silence before a rank's first request.
        """
        self.keys = RendezvousStore()
        self._on_lost = on_lost
        self._silence_s = silence_s
        self._start_s = start_s
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._channels: list[RankChannel] = []
        self._is_over = False

    def serve(self, channel: RankChannel) -> None:
        """Answer a rank's requests from now on; takes ownership of the channel."""
        thread = threading.Thread(target=self._run, args=(channel,), name="tandem-pulses", daemon=True)
        with self._lock:
            if self._is_over:
                channel.close()
                return
            self._channels.append(channel)
            self._threads.append(thread)
            thread.start()

    def hang_up(self) -> None:
        """Shut down all connections, which every rank notices. From any thread."""
        with self._lock:
            self._is_over = True
            channels = tuple(self._channels)
        self.keys.close()
        for channel in channels:
            channel.hang_up()

    def close(self) -> None:
        """Hang up and release everything. Not to be called on one of the server's own threads."""
        self.hang_up()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        for channel in self._channels:
            channel.close()

    def _run(self, channel: RankChannel) -> None:
        try:
            channel.set_timeout(self._start_s)
            while (message := channel.receive()) is not None:
                channel.set_timeout(self._silence_s)
                if message[0] is not ChannelKind.ASK:
                    raise RankLost(f"{channel.peer} sent {message[0].name}, not {ChannelKind.ASK.name}")
                answer = self.keys.answer(json.loads(bytes(message[1])))
                channel.send(ChannelKind.ANSWER, json.dumps(answer).encode())
            self._report(RankLost(f"{channel.peer} has ended"))
        except RankLost as lost:
            self._report(lost)
        except ValueError:  # not JSON
            self._report(RankLost(f"{channel.peer} sent a malformed heartbeat"))

    def _report(self, lost: RankLost) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._on_lost(lost)
