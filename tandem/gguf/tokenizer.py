"""What `tokenizer.json` and `tokenizer_config.json` would say of a GGUF file's tokenizer.

Two kinds are read: `gpt2`, byte-level BPE with merges, and `llama`, SentencePiece's BPE, which has a score for each
piece instead. In the latter a piece may be merged from any two others, the piece of the best score first; that makes
the list of merges, in the order in which transformers' converter puts it.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from tandem.gguf.architecture import CONTROL
from tandem.gguf.container import GgufHeader
from tandem.gguf.pre_tokenizers import PRE_TOKENIZERS

_KEYS = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 4, 5, 6
_MAX_TOKEN_CHARS = 1024
_SPACE_MARK = "▁"
_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def tokenizer_json(header: GgufHeader) -> dict[str, Any]:
    """Raises ConfigError for a tokenizer of another kind, and for a vocabulary that contradicts itself."""
    kind = header.text(f"{_KEYS}model")
    if kind not in _KINDS:
        raise header.error(f"{_KEYS}model", f"must be one of {', '.join(_KINDS)}, is {kind!r:.40}")
    tokens, types = _vocabulary(header)
    special = (CONTROL, _UNKNOWN)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added(i, token, is_special=types[i] in special)
            for i, token in enumerate(tokens)
            if types[i] in (*special, _USER_DEFINED)
        ],
        **_KINDS[kind](header, tokens, types),
    }


def tokenizer_config_json(header: GgufHeader) -> dict[str, Any]:
    """The texts of special tokens, and the chat template, if there is one."""
    tokens, _ = _vocabulary(header)
    found = {name: _token(header, key, tokens) for key, name in _NAMES.items()}
    config: dict[str, Any] = {name: token for name, token in found.items() if token is not None}
    if header.has("tokenizer.chat_template"):
        config["chat_template"] = header.text("tokenizer.chat_template")
    return config


def _vocabulary(header: GgufHeader) -> tuple[list[str], Sequence[float]]:
    """Tokens and their types, without unused ones at the end: those only fill the model's table."""
    tokens, types = header.texts(f"{_KEYS}tokens"), header.numbers(f"{_KEYS}token_type")
    if len(types) != len(tokens):
        raise header.error(f"{_KEYS}token_type", f"has {len(types)} elements for {len(tokens)} tokens")
    size = max((i + 1 for i, kind in enumerate(types) if kind != _UNUSED), default=0)
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens[:size])]
    first: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if len(token) > _MAX_TOKEN_CHARS:
            raise header.error(f"{_KEYS}tokens", f"token {i} has {len(token)} characters, at most {_MAX_TOKEN_CHARS}")
        if (other := first.setdefault(token, i)) != i:
            raise header.error(f"{_KEYS}tokens", f"{token!r:.40} is both token {other} and {i}")
    return tokens, types[:size]


def _byte_level(header: GgufHeader, tokens: Sequence[str], _types: Sequence[float]) -> dict[str, Any]:
    name = header.text(f"{_KEYS}pre")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise header.error(f"{_KEYS}pre", f"must be one of {known}, is {name!r:.40}")
    pre = PRE_TOKENIZERS[name]
    ids = {token: i for i, token in enumerate(tokens)}
    merges = [_merge(header, text, ids) for text in header.texts(f"{_KEYS}merges")]
    steps = list(pre.steps)
    return {
        "normalizer": pre.normalizer,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(header, tokens, adds_bos=pre.adds_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(ids, merges, ignore_merges=pre.ignores_merges),
    }


def _merge(header: GgufHeader, text: str, ids: Mapping[str, int]) -> tuple[str, str]:
    left, space, right = text.partition(" ")
    if not space or left not in ids or right not in ids or left + right not in ids:
        raise header.error(f"{_KEYS}merges", f"{text!r:.40} does not join two tokens to a third")
    return left, right


def _sentencepiece(header: GgufHeader, tokens: Sequence[str], types: Sequence[float]) -> dict[str, Any]:
    scores = header.numbers(f"{_KEYS}scores")
    if len(scores) < len(tokens):
        raise header.error(f"{_KEYS}scores", f"has {len(scores)} elements for {len(tokens)} tokens")
    normal = [score for score, kind in zip(scores, types, strict=False) if kind == _NORMAL]
    if len(normal) > 1 and len(set(normal)) == 1:
        # So a converter writes that had no SentencePiece model: nobody can tell what is merged first.
        raise header.error(f"{_KEYS}scores", f"are all {normal[0]}: convert the model again, from its tokenizer.model")
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    prefix = header.boolean(f"{_KEYS}add_space_prefix", True)
    marks = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE_MARK}
    spaces = {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}
    prepend, strip = (
        {"type": "Prepend", "prepend": _SPACE_MARK},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    )
    decoders = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}, *([strip] if prefix else [])]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*([prepend] if prefix else []), marks]},
        "pre_tokenizer": None,
        "post_processor": _post_processor(header, tokens, adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(
            {token: i for i, token in enumerate(tokens)},
            _merges_by_score(tokens, types, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=_BYTE in types,
        ),
    }


def _merges_by_score(
    tokens: Sequence[str], types: Sequence[float], scores: Sequence[float]
) -> Sequence[tuple[str, str]]:
    """All pairs of pieces that join to a third. No text is ever merged to a control token, whatever its score."""
    ids = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _NORMAL}
    found: list[tuple[float, int, int, str, str]] = []
    for token, i in ids.items():
        pairs = [
            (token[:cut], token[cut:]) for cut in range(1, len(token)) if token[:cut] in ids and token[cut:] in ids
        ]
        pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        found += [(scores[i], len(left), len(right), left, right) for left, right in pairs]
    found.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [(left, right) for *_, left, right in found]


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _bpe(ids: Mapping[str, int], merges: Sequence[tuple[str, str]], **settings: Any) -> dict[str, Any]:
    model: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return model | settings | {"vocab": ids, "merges": merges}


def _post_processor(header: GgufHeader, tokens: Sequence[str], *, adds_bos: bool) -> dict[str, Any] | None:
    """Put the file's tokens around a prompt; `adds_bos`: whether one comes before it where the file does not say."""
    ends = [
        key if header.boolean(f"{_KEYS}add_{key}_token", default) else None
        for key, default in (("bos", adds_bos), ("eos", False))
    ]
    if ends == [None, None]:
        return None
    names = [None if key is None else _token(header, key, tokens) for key in ends]
    for key, name in zip(ends, names, strict=True):
        if key is not None and name is None:
            raise header.error(f"{_KEYS}{key}_token_id", "is missing, and has to be put around every prompt")
    single, pair = _template(names, ("A", 0)), _template(names, ("A", 0), ("B", 1))
    ids = {name: tokens.index(name) for name in names if name is not None}
    special = {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in ids.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _template(names: Sequence[str | None], *sequences: tuple[str, int]) -> list[dict[str, Any]]:
    before, after = ([] if name is None else [name] for name in names)
    parts: list[dict[str, Any]] = []
    for sequence, type_id in sequences:
        parts += [{"SpecialToken": {"id": name, "type_id": type_id}} for name in before]
        parts.append({"Sequence": {"id": sequence, "type_id": type_id}})
        parts += [{"SpecialToken": {"id": name, "type_id": type_id}} for name in after]
    return parts


def _token(header: GgufHeader, key: str, tokens: Sequence[str]) -> str | None:
    """The token that the file names for a purpose, such as `bos`."""
    name = f"{_KEYS}{key}_token_id"
    return tokens[header.integer(name, high=len(tokens) - 1)] if header.has(name) else None


def _added(token_id: int, token: str, *, is_special: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": token, **plain, "special": is_special}
