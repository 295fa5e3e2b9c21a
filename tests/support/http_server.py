"""A handler of Python's own HTTP server, answering on a real socket."""

import http.server
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager

Handler = type[http.server.BaseHTTPRequestHandler]


@contextmanager
def serving(handler: Handler, *, port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[http.server.HTTPServer]:
    """While entered; in the end its thread and its socket are gone. `port` 0: one of its own."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def answering(handler: Handler, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The same, as its URL."""
    with serving(handler, tls=tls) as server:
        yield f"http{'' if tls is None else 's'}://127.0.0.1:{server.server_port}"
