"""What a supervisor starts in place of a process that is forked elsewhere: `python standin.py SOCKET READY_FD ARG ...`.

It hands its descriptors and that one's arguments to the fork server, passes signals on, and ends as the process ends.
If it is killed itself, the fork server kills the process. Imports next to nothing: it starts in some milliseconds.
"""

import json
import os
import signal
import socket
import sys


def main(path: str, ready_fd: str, *arguments: str) -> int:
    """The exit code, unless a signal ended the other one: then the same signal ends this process."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(path)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda number, _frame: link.send(str(number).encode()))
    socket.send_fds(link, [json.dumps(arguments).encode()], [int(ready_fd), 1, 2])
    os.close(int(ready_fd))
    status = int(link.recv(16) or -signal.SIGKILL)
    if status < 0:
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
