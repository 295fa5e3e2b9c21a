"""Fork servers: a process that has imported everything forks workers, so that they start without the wait.

`python -m tests.proofs.kills.fork_server SOCKET KIND`.

Importing takes a worker seconds of processor time, its own work to start a few tenths. Each connection to the socket is
the life of one process: its arguments and descriptors come in (see `standin`), then signals, and its exit status goes
out. A process dies with its connection. What is forked runs the same `serve` as `python -m prefill_worker`; a worker
says more about itself (`tests.proofs.kills.watched`). Routers come from a fork server of their own, where there is no
torch.
"""

import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from cluster.processes.effective_config import child_environment, place_arguments
from cluster.supervisor.supervisor import ProcessPlan, Role
from tandem.process.lifetime import router_main, worker_main
from tandem.values.roles import WorkerRole

_STANDIN = Path(__file__).with_name("standin.py")
_PR_SET_PDEATHSIG = 1
_MODULES = {role.value: "router.__main__" if role is Role.ROUTER else f"{role.value}_worker.__main__" for role in Role}
_ROUTERS, _WORKERS = "routers", "workers"
_KINDS = {
    _ROUTERS: (_MODULES[Role.ROUTER.value],),
    _WORKERS: (_MODULES[Role.PREFILL.value], _MODULES[Role.DECODE.value], "tests.proofs.kills.watched"),
}
"""What each kind of fork server imports."""


@contextmanager
def start_fork_servers(folder: Path) -> Iterator[Callable[[ProcessPlan, Path, int], Sequence[str]]]:
    """Start one of each kind and yield the command by which `LocalCluster` then starts processes.

    Workers are watched in `folder`.
    """
    paths = {kind: folder / f"{kind}.fork" for kind in _KINDS}
    environment = child_environment(os.environ) | {"OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        begun = []
        for kind, path in paths.items():
            command = [sys.executable, "-m", "tests.proofs.kills.fork_server", str(path), kind]
            begun.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE))
            stack.callback(begun[-1].communicate)
            stack.callback(begun[-1].kill)
        for process in begun:
            assert process.stdout is not None
            assert process.stdout.readline(), "the fork server has not started"

        def command_of(plan: ProcessPlan, config_path: Path, ready_fd: int) -> Sequence[str]:
            path = paths[_ROUTERS if plan.role is Role.ROUTER else _WORKERS]
            place = [plan.role.value, str(folder / f"{plan.name}.sock"), *place_arguments(plan, config_path)]
            return [sys.executable, "-I", "-S", str(_STANDIN), str(path), str(ready_fd), *place]

        yield command_of


class ForkServer:
    """The parent of all processes that are forked from it, and the socket that they are requested by."""

    def __init__(self, path: str) -> None:
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.bind(path)
        self._server.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, self._admit)

    def run(self) -> None:
        while True:
            self.look()

    def look(self) -> None:
        """Wait until a connection has something to read, and handle all that have."""
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
        order, descriptors, _, _ = socket.recv_fds(link, 1 << 16, 3)
        if len(descriptors) != 3:  # the client has died
            link.close()
            return
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = _be(descriptors, *json.loads(order))
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

        def on_ready() -> None:
            number = link.recv(16)
            signal.pidfd_send_signal(pid_fd, int(number or signal.SIGKILL))

        self._selector.register(pid_fd, selectors.EVENT_READ, ended)
        self._selector.register(link, selectors.EVENT_READ, on_ready)


def _be(descriptors: list[int], role: str, watch_path: str, *arguments: str) -> int:
    """One process's whole life, down to its exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as in `cluster.processes.child`
    ready_fd, out, err = descriptors
    os.dup2(out, 1)
    os.dup2(err, 2)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != ready_fd:
            with suppress(OSError):  # that of the listing itself
                os.close(number)
    module = importlib.import_module(_MODULES[role])
    sys.argv = [role, *arguments, "--ready-fd", str(ready_fd)]
    if role == Role.ROUTER.value:
        return router_main(module.serve)
    from tests.proofs.kills.watched import watch

    watch(module, Path(watch_path))
    return worker_main(WorkerRole(role), module.serve)


def main(path: str, kind: str) -> None:
    """Fork workers on request until killed."""
    for name in _KINDS[kind]:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("something that was imported has started threads: nothing can be forked from here")
    gc.collect()
    gc.freeze()
    with closing(ForkServer(path)) as served:
        print("ready", flush=True)
        served.run()


if __name__ == "__main__":
    main(*sys.argv[1:])
