"""A request's headers, for reading several of them."""

from starlette.types import Scope


def first_headers(scope: Scope) -> dict[bytes, bytes]:
    """Return the first value of each header, by its name in small letters.

    starlette's `Headers` searches its list, and decodes what it finds, for each header that is asked for.
    """
    return dict(reversed(scope["headers"]))
