"""Token ids of the beginnings of conversations, so that a history is not encoded again with each of its turns. Pure.

A rendered conversation is cut into pieces where the tokenizer reads what comes before and after independently
(`Tokenizer.encode_chat` decides where). A piece is kept under a keyed hash of everything up to its end, as blocks of KV
are: so a piece is found only by who sends all that precedes it, within one scope. A scope is a tenant's salt, because
the time that an encoding takes would otherwise tell one tenant what another has sent.
"""

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from threading import Lock

_KEY_BYTES = 32
_NAME_BYTES = 16
_ENTRY_BYTES = 300
"""What an entry takes besides its ids, about."""


class EncodedPrefixes:
    """The pieces last used, within a bound of bytes. Safe to use from several threads."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._pieces: OrderedDict[bytes, array[int]] = OrderedDict()
        """Those used last come last."""
        self._lock = Lock()
        self.num_bytes = 0
        self.num_known_tokens = 0
        """Tokens that `find` has returned so far."""
        self.num_encoded_tokens = 0
        """Tokens that were encoded all the same; see `count_encoded`."""

    def names(self, scope: str, pieces: Sequence[str]) -> list[bytes]:
        """Return the names of a conversation's pieces, in order."""
        # Hashed first, so that no end of a scope can spell the beginning of a piece.
        names, name = [], blake2b(scope.encode(), key=self._key, digest_size=_NAME_BYTES).digest()
        for piece in pieces:
            digest = blake2b(name, key=self._key, digest_size=_NAME_BYTES)
            digest.update(piece.encode())
            name = digest.digest()
            names.append(name)
        return names

    def find(self, names: Sequence[bytes]) -> list["array[int]"]:
        """Return the ids of the leading pieces that are known."""
        found: list[array[int]] = []
        with self._lock:
            for name in names:
                if (ids := self._pieces.get(name)) is None:
                    break
                found.append(ids)
            # The first piece last, so that no piece outlives one without which it cannot be found.
            for name in reversed(names[: len(found)]):
                self._pieces.move_to_end(name)
            self.num_known_tokens += sum(map(len, found))
        return found

    def count_encoded(self, num_tokens: int) -> None:
        """Count tokens of a conversation that had to be encoded."""
        with self._lock:
            self.num_encoded_tokens += num_tokens

    def add(self, names: Sequence[bytes], pieces: Sequence["array[int]"]) -> None:
        """Keep pieces under their names, in place of those that were not used for the longest time."""
        with self._lock:
            for name, ids in reversed(list(zip(names, pieces, strict=True))):
                if name not in self._pieces:
                    self.num_bytes += _size(ids)
                self._pieces[name] = ids
                self._pieces.move_to_end(name)
            while self.num_bytes > self._max_bytes:
                _, dropped = self._pieces.popitem(last=False)
                self.num_bytes -= _size(dropped)


def _size(ids: "array[int]") -> int:
    return _ENTRY_BYTES + len(ids) * ids.itemsize
