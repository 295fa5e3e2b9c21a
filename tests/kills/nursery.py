"""Workers without the wait: a process that has imported everything forks them, `python -m tests.kills.nursery SOCKET`.

Importing takes a worker seconds of processor time, its own work to start a few tenths. Each connection to the socket is
the life of one worker: its arguments and descriptors come in (see `standin`), then signals, and its exit status goes
out. A worker dies with its connection. What is forked runs the same `serve` as `python -m prefill_worker`, and says
more about itself (`tests.kills.watched`).
"""

import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import decode_worker.__main__
import prefill_worker.__main__
from cluster.effective import child_environment, module_command, place_arguments
from cluster.supervisor import ProcessPlan, Role
from tandem.process import worker_main
from tandem.roles import WorkerRole
from tests.kills.watched import watch

_STANDIN = Path(__file__).with_name("standin.py")
_PR_SET_PDEATHSIG = 1
_MODULES = {WorkerRole.PREFILL: prefill_worker.__main__, WorkerRole.DECODE: decode_worker.__main__}


@contextmanager
def nursery(folder: Path) -> Iterator[Callable[[ProcessPlan, Path, int], Sequence[str]]]:
    """Start one; how `LocalCluster` is to start its processes then. Workers are watched in `folder`."""
    path = folder / "nursery.sock"
    environment = child_environment(os.environ) | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kills.nursery", str(path)], env=environment, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline(), "the nursery has not started"

        def command(plan: ProcessPlan, config_path: Path, ready_fd: int) -> Sequence[str]:
            if plan.role is Role.ROUTER:
                return module_command(plan, config_path, ready_fd)
            worker = [plan.role.value, str(folder / f"{plan.name}.sock")]
            worker += place_arguments(plan, config_path)
            return [sys.executable, "-I", "-S", str(_STANDIN), str(path), str(ready_fd), *worker]

        yield command
    finally:
        process.kill()
        process.communicate()


class Nursery:
    """One process's workers."""

    def __init__(self, path: str) -> None:
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(path)
        self._server.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, self._admit)

    def run(self) -> None:
        """Until killed."""
        while True:
            self.look()

    def look(self) -> None:
        """Wait until somebody has something to say, and hear everybody who has."""
        for key, _ in self._selector.select():
            # One worker's end takes its connection away, too; and its number may by now be that of another.
            if self._selector.get_map().get(key.fd) is key:
                key.data()

    def close(self) -> None:
        """Admit nobody any more."""
        self._selector.close()
        self._server.close()

    def _admit(self) -> None:
        link, _ = self._server.accept()
        told, descriptors, _, _ = socket.recv_fds(link, 1 << 16, 3)
        if len(descriptors) != 3:  # whoever connected has died
            link.close()
            return
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = _be_a_worker(descriptors, *json.loads(told))
            finally:
                os._exit(code)
        for descriptor in descriptors:
            os.close(descriptor)
        self.look_after(link, pid)

    def look_after(self, link: socket.socket, pid: int) -> None:
        """Pass on what a connection says to the process that is its worker, and to the connection how that ended."""
        pid_fd = os.pidfd_open(pid)

        def ended() -> None:
            _, status = os.waitpid(pid, 0)
            self._selector.unregister(pid_fd)
            os.close(pid_fd)
            self._selector.unregister(link)
            link.setblocking(False)
            with suppress(OSError):  # what is left unread would take the answer along
                while link.recv(16):
                    pass
            with suppress(OSError):  # the stand-in was killed first
                link.send(str(os.waitstatus_to_exitcode(status)).encode())
            link.close()

        def told() -> None:
            number = link.recv(16)
            signal.pidfd_send_signal(pid_fd, int(number or signal.SIGKILL))

        self._selector.register(pid_fd, selectors.EVENT_READ, ended)
        self._selector.register(link, selectors.EVENT_READ, told)


def _be_a_worker(descriptors: list[int], role_name: str, watch_path: str, *arguments: str) -> int:
    """The worker's whole life, down to its exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    ready_fd, out, err = descriptors
    os.dup2(out, 1)
    os.dup2(err, 2)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != ready_fd:
            with suppress(OSError):  # that of the listing itself
                os.close(number)
    role = WorkerRole(role_name)
    sys.argv = [f"{role_name}_worker", *arguments, "--ready-fd", str(ready_fd)]
    watch(_MODULES[role], Path(watch_path))
    return worker_main(role, _MODULES[role].serve)


def main(path: str) -> None:
    """Serve until killed."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("something that was imported has started threads: nothing can be forked from here")
    gc.collect()
    gc.freeze()
    with closing(Nursery(path)) as served:
        print("ready", flush=True)
        served.run()


if __name__ == "__main__":
    main(sys.argv[1])
