"""Converts text to tokens and back, for one model directory.

What a client writes can never become a control token. Plain prompts are encoded with special tokens switched off. In a
conversation only the template may write them: before rendering, every place in a client's text where a special token's
literal stands, or might begin at its end, is replaced by an unguessable mark; in the rendered text the remaining
literals, all from the template, become aliases; the marks turn back into the client's characters; and the tokenizer,
configured to read special literals as text and extended with the aliases, encodes the result at once.
"""

import json
import random
import re
import secrets
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from router.text.chat_template import ChatTemplate, Message, check_template
from router.text.conversation import TemplateOptions
from router.text.detokenizer import Detokenizer, JsonTexts, read_pieces
from router.text.encoded_prefixes import EncodedPrefixes
from router.text.tools import ToolDefinition
from tandem.errors import ConfigError, InvalidRequest
from tandem.model_files import has_model_file, read_model_text

MAX_FILE_BYTES = 256 << 20
_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_DECODE_SAMPLES = 64
_LEAST_PIECE_CHARS = 1024
"""Length of the pieces of a conversation that are kept."""
LEAST_KNOWN_CHARS = 4096
"""Shorter conversations are encoded as a whole: to keep a piece takes some 7 % of the time in which it is encoded."""
_CUT_SAMPLES = ("", " ", "word", "a 7 ", "\n\n", "'\u6587")
"""Texts beside a control token that a tokenizer might read differently if they were cut there."""


class Tokenizer:
    """One model's tokenizer, safe to use from several threads."""

    def __init__(self, spec: str, template: ChatTemplate | None, bos_token: str | None = None) -> None:
        """`spec` is the text of a tokenizer.json. Raises ConfigError when it cannot be served."""
        self._template = template
        self._library = _parse(spec)
        added = self._library.get_added_tokens_decoder()
        special = {i: token for i, token in added.items() if token.special}
        self.special_ids = frozenset(special)
        self.added_ids = {token.content: i for i, token in added.items()}
        """Ids of added tokens by text: tokens that are matched as a whole."""
        self.bos_token_id = None if bos_token is None else self.added_ids.get(bos_token)
        """The model's token for the beginning of a sequence, whether or not prompts get it; None: it has none."""
        self.size = max([self._library.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)])
        """One above the highest token id that has a text."""
        raw = json.loads(spec)
        _check_token_ids(raw)
        self._pieces = read_pieces(raw.get("decoder"), self.size, self._library.id_to_token)
        self._guard = _Guard([token.content for token in special.values()])
        self._ids_of_aliases: dict[str, int] = {}
        self._alias_ids = self._add_aliases(special)
        self._cuts: dict[str, bool] = {}
        """What `_may_cut` has found out so far; it finds the same for an alias whenever it looks."""
        self._prove_decoding()

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Load from a model directory in Hugging Face layout: tokenizer.json, tokenizer_config.json,
        chat_template.jinja; or from a GGUF file.

        Raises ConfigError that names the file.
        """
        config = json.loads(_read(directory / "tokenizer_config.json") or "{}")
        if not isinstance(config, dict):
            raise ConfigError(f"{directory / 'tokenizer_config.json'}: expected an object")
        spec = _read(directory / "tokenizer.json")
        if spec is None:
            raise ConfigError(f"{directory}: no tokenizer.json")
        source = _read(directory / "chat_template.jinja") or _template_in(config)
        names = {name: text for name in _TOKEN_NAMES if (text := _text(config.get(name)))}
        template = None if source is None else ChatTemplate(source, names, form=check_template(source, names))
        return cls(spec, template, names.get("bos_token"))

    @property
    def template(self) -> ChatTemplate | None:
        return self._template

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be served."""
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a plain prompt; `add_special_tokens` lets the tokenizer add its own (such as BOS) around it.

        Raises InvalidRequest for text that is not valid Unicode or contains NUL.
        """
        check_text(text, "prompt")
        return self._encode(text, add_special_tokens=add_special_tokens)

    def encode_pair(
        self, text: str, pair: str | None, *, add_special_tokens: bool, kept: int | None, param: str
    ) -> list[int]:
        """Encode a text, or two as the tokenizer joins a pair. Of more than `kept` tokens the last ones of the last
        text are left out, while the tokenizer's own stay; None: all are kept.

        Raises InvalidRequest as `encode`, and where the first text of a pair leaves no room for the second.
        """
        for one in (text, pair):
            if one is not None:
                check_text(one, param)
        whole = self._library.encode(text, pair, add_special_tokens=add_special_tokens)
        ids: list[int] = whole.ids
        if kept is None or len(ids) <= kept:
            return ids
        num_own = self._library.num_special_tokens_to_add(pair is not None) if add_special_tokens else 0
        first = self._library.encode(text, add_special_tokens=False)
        last = first if pair is None else self._library.encode(pair, add_special_tokens=False)
        room = kept - num_own - (0 if pair is None else len(first.ids))
        if room < 1:
            raise InvalidRequest(f"{param}: {kept} tokens leave no room for it", param=param)
        last.truncate(room)
        cut: list[int] = self._library.post_process(
            first, None if pair is None else last, add_special_tokens=add_special_tokens
        ).ids
        return cut

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        max_chars: int,
        tools: Sequence[ToolDefinition] = (),
        options: TemplateOptions = TemplateOptions(),  # noqa: B008  # frozen
        known: EncodedPrefixes | None = None,
        scope: str = "",
    ) -> list[int]:
        """Encode a conversation, rendered by the model's template.

        `known`: beginnings of conversations that need not be encoded again within `scope`, which gets this one's too.
        Raises InvalidRequest when there is no template, when it refuses the messages, or beyond `max_chars`.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        text = self._template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            max_chars=max_chars,
            hide=self._hidden,
            options=options,
        )
        parts = self._guard.resolve(text)
        if known is not None and len(text) >= LEAST_KNOWN_CHARS:
            return self._encode_known(parts, known, scope)
        token_ids = self._encode("".join(parts), add_special_tokens=False)
        return list(map(self._alias_ids.get, token_ids, token_ids))

    def _encode_known(self, parts: Sequence[str], known: EncodedPrefixes, scope: str) -> list[int]:
        """Encode what `_Guard.resolve` returned, from the end of the longest beginning that is known."""
        pieces = self._cut(parts)
        names = known.names(scope, [piece.text for piece in pieces[:-1]])
        found = known.find(names)
        token_ids: list[int] = []
        for ids in found:
            token_ids.extend(ids)
        rest = pieces[len(found) :]
        read = self._encode("".join([piece.text for piece in rest]), add_special_tokens=False)
        fresh = list(map(self._alias_ids.get, read, read))
        known.count_encoded(len(fresh))
        if (new := names[len(found) :]) and (starts := _starts_of(rest, read)) is not None:
            known.add(new, [array("i", fresh[a:b]) for a, b in pairwise(starts)])
        return token_ids + fresh

    def _cut(self, parts: Sequence[str]) -> list["_Piece"]:
        """Join parts to pieces that are worth keeping. All but the first begin with an alias where texts may be cut."""
        pieces: list[_Piece] = []
        aliases: list[int] = []
        texts, num_chars = [parts[0]], len(parts[0])
        for alias, text in zip(parts[1::2], parts[2::2], strict=True):
            if num_chars >= _LEAST_PIECE_CHARS and self._may_cut(alias):
                pieces.append(_Piece("".join(texts), aliases))
                texts, aliases, num_chars = [], [], 0
            texts += (alias, text)
            aliases.append(self._ids_of_aliases[alias])
            num_chars += len(text)
        pieces.append(_Piece("".join(texts), aliases))
        return pieces

    def _may_cut(self, alias: str) -> bool:
        """Whether the library reads what precedes this alias, and what begins with it, independently; tried once."""
        if (may_cut := self._cuts.get(alias)) is None:
            may_cut = self._cuts[alias] = all(
                self._read(before + alias + after) == self._read(before) + self._read(alias + after)
                for before in _CUT_SAMPLES
                for after in _CUT_SAMPLES
            )
        return may_cut

    def _read(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)

    def _hidden(self, text: str) -> str:
        if "\0" in text or not text.isascii():  # ASCII has no surrogates
            check_text(text, "messages")
        return self._guard.hide(text)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode all tokens at once."""
        known = [i for i in token_ids if i < self.size]
        text: str = self._library.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, *, skip_special_tokens: bool = True, shown_ids: frozenset[int] = frozenset()) -> Detokenizer:
        """Start a stream whose pieces, joined, equal `decode` of its tokens; `shown_ids`: special tokens not to be
        skipped."""
        if not skip_special_tokens:
            return self._pieces.detokenizer(frozenset())
        return self._pieces.detokenizer(self.special_ids - shown_ids if shown_ids else self.special_ids)

    @cached_property
    def json_texts(self) -> JsonTexts | None:
        """The texts of tokens that do not depend on other tokens; None where all do. Takes a while for the first
        time."""
        return self._pieces.json_texts(self.special_ids)

    def check_fits(self, vocab_size: int) -> None:
        """Check that the model embeds every token id of the tokenizer. Raises ConfigError."""
        if self.size > vocab_size:
            raise ConfigError(f"the tokenizer has {self.size} tokens, but the model's vocabulary has {vocab_size}")

    def bytes_of(self, token_id: int) -> bytes:
        """Return one token's bytes, for logprobs."""
        return self._pieces.bytes_of(token_id)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # "fast": without the offsets of tokens in the text, which are not needed.
        (encoded,) = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def _add_aliases(self, special: dict[int, Any]) -> dict[int, int]:
        """Make the library read special literals as text, and only their aliases as control tokens."""
        self._library.encode_special_tokens = True
        alias_ids = {}
        for token_id, token in special.items():
            alias = self._guard.alias(token.content)
            # Not "special", so that encode_special_tokens leaves it alone; otherwise like the token it stands for.
            like = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
            self._library.add_tokens([tokenizers.AddedToken(alias, normalized=False, special=False, **like)])
            alias_id = self._ids_of_aliases[alias] = self._library.token_to_id(alias)
            alias_ids[alias_id] = token_id
        return alias_ids

    def _prove_decoding(self) -> None:
        rng = random.Random(0)
        for _ in range(_DECODE_SAMPLES):
            ids = [rng.randrange(self.size) for _ in range(32)]
            stream = self.detokenizer(skip_special_tokens=False)
            if "".join(map(stream.push, ids)) + stream.flush() != self.decode(ids, skip_special_tokens=False):
                raise ConfigError("tokenizer.json: its decoder cannot be streamed exactly")


class _Piece(NamedTuple):
    """A part of a rendered conversation."""

    text: str
    aliases: Sequence[int]
    """The ids of the aliases in it, in order."""


def _starts_of(pieces: Sequence[_Piece], token_ids: list[int]) -> list[int] | None:
    """Return where each piece begins in the tokens of all of them; None where an alias was not read as one token."""
    starts, at = [0], -1
    try:
        for nth, piece in enumerate(pieces):
            for alias in piece.aliases:
                at = token_ids.index(alias, at + 1)
                if nth == len(starts):
                    starts.append(at)
    except ValueError:
        return None
    return starts


class _Guard:
    """Distinguishes a client's literals of special tokens from the template's."""

    def __init__(self, literals: Sequence[str]) -> None:
        nonce = secrets.token_hex(8)
        self._mark = f"\ufdd0{nonce}:"
        self._aliases = {text: f"\ufdd1{nonce}:{number};" for number, text in enumerate(literals)}
        longest_first = sorted(literals, key=len, reverse=True)
        self._literal = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._starts = re.compile(_starts_pattern(longest_first))
        # A tail that begins a literal could be completed by the text that follows it.
        self._tails = frozenset(text[:n] for text in literals for n in range(1, len(text)))
        self._longest_tail = max(map(len, self._tails), default=0)
        self._hidden = re.compile(f"{self._mark}([0-9a-f]+);")

    def alias(self, literal: str) -> str:
        """Return the alias for the template's own `literal`."""
        return self._aliases[literal]

    def hide(self, text: str) -> str:
        """Return a client's text in which no literal stands and none begins."""
        at = set[int]()
        for found in self._starts.finditer(text):
            at.add(found.start())
        for i in range(max(0, len(text) - self._longest_tail), len(text)):
            if text[i:] in self._tails:
                at.add(i)
        if not at:
            return text
        return "".join(f"{self._mark}{ord(c):x};" if i in at else c for i, c in enumerate(text))

    def resolve(self, rendered: str) -> list[str]:
        """Replace the literals left in the rendered text by aliases, and restore clients' text.

        Returns texts and aliases by turns, beginning and ending with a text, which may be empty.
        """
        parts = self._literal.split(rendered)
        # Every second one is a literal; `sub` would call a function of ours for each.
        parts[1::2] = map(self._aliases.__getitem__, parts[1::2])
        if self._mark in rendered:
            parts[::2] = [self._hidden.sub(lambda found: chr(int(found[1], 16)), text) for text in parts[::2]]
        return parts


def _starts_pattern(literals: Sequence[str]) -> str:
    """Return a pattern that matches the first character of every occurrence, overlapping ones too."""
    rests: dict[str, list[str]] = {}
    for text in literals:
        rests.setdefault(text[0], []).append(re.escape(text[1:]))
    return "|".join(f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()) or "(?!)"


def check_text(text: str, param: str) -> None:
    """Raise InvalidRequest for lone surrogates and NUL."""
    if "\0" in text:
        raise InvalidRequest(f"{param}: NUL characters are not allowed", param=param)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param}: not valid Unicode (lone surrogate)", param=param) from None


def _parse(spec: str) -> Any:
    try:
        return tokenizers.Tokenizer.from_str(spec)
    except Exception as error:  # noqa: BLE001  # the library raises bare Exception for every bad file
        raise ConfigError(f"tokenizer.json: {error}") from None


def _check_token_ids(raw: dict[str, Any]) -> None:
    """Raise ConfigError where two tokens share an id: one of them could be read and never be written."""
    model, added = raw.get("model"), raw.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    places: dict[str, Iterable[tuple[Any, Any]]] = {
        "model.vocab": vocab.items() if isinstance(vocab, dict) else (),
        "added_tokens": [(one.get("content"), one.get("id")) for one in added or () if isinstance(one, dict)],
    }
    for place, tokens in places.items():
        known: dict[Any, Any] = {}
        for text, token_id in tokens:
            if (other := known.setdefault(token_id, text)) != text:
                raise ConfigError(f"tokenizer.json: {place}: {other!r:.40} and {text!r:.40} are both token {token_id}")


def _read(path: Path) -> str | None:
    return read_model_text(path, max_bytes=MAX_FILE_BYTES) if has_model_file(path) else None


def _text(token: Any) -> str | None:
    """Return the text of a special token, which is given as text, or as an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _template_in(config: dict[str, Any]) -> str | None:
    """Return the template itself, or the one named `default` of several."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
