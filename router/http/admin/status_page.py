"""The status page: files that come with the package, under headers that let nothing else in.

No key is asked for here unless told: the files are the same for everybody, and say nothing of the cluster.
"""

from collections.abc import Iterator
from hashlib import blake2b
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from router.http.routing.access_guard import Handler, OperatorPage, operator
from router.http.routing.route_table import Routes

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Kept, but never shown without asking whether it is still the same.
    "Cache-Control": "no-cache",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_INDEX = "index.html"


def add_page(routes: Routes) -> None:
    """The page at `/`, what it is made of under `/status/`."""
    for name, media_type, content in _files():
        path = "/" if name == _INDEX else f"/status/{name}"
        routes.add("GET", path, operator(_shown(content, media_type), OperatorPage.PAGE))


def _files() -> Iterator[tuple[str, str, bytes]]:
    for file in (resources.files("router") / "status" / "page").iterdir():
        stem, dot, ending = file.name.rpartition(".")
        if stem and (media_type := _TYPES.get(dot + ending)) is not None:
            yield file.name, media_type, file.read_bytes()


def _shown(content: bytes, media_type: str) -> Handler:
    tag = f'"{blake2b(content, digest_size=16).hexdigest()}"'
    headers = {**HEADERS, "ETag": tag}

    async def show(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=media_type)

    return show
