"""The names of all settings, and which of them somebody may have meant. Pure."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel

_ALIKE = 0.7
"""As `difflib` measures it: a letter more, less or swapped in a short name."""


def names_of(section: type[BaseModel], before: str = "") -> Iterator[str]:
    """All names below it, with dots; sections as well as what is in them."""
    for name, field in section.model_fields.items():
        yield before + name
        for inner in _sections_in(field.annotation):
            yield from names_of(inner, f"{before}{name}.")


def meant_by(section: type[BaseModel], wrong: Sequence[str | int]) -> str | None:
    """The setting that is most like a name that there is not: beside it, else of the same word elsewhere."""
    *parents, word = map(str, wrong)
    names = list(dict.fromkeys(names_of(section)))
    beside = {name.rpartition(".")[2]: name for name in names if name.split(".")[:-1] == parents}
    if found := get_close_matches(word, beside, n=1, cutoff=_ALIKE):
        return beside[found[0]]
    elsewhere = [name for name in names if name.rpartition(".")[2] == word]
    if len(elsewhere) == 1:
        return elsewhere[0]
    return next(iter(get_close_matches(".".join((*parents, word)), names, n=1, cutoff=_ALIKE)), None)


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Such as the one in `Section | None`; what is in lists and mappings has names of the user's own."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            yield one
