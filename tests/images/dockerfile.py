"""A Dockerfile as values. BuildKit's own parser reads it; what stages and steps mean is said here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import dockerfile

FOLDER = Path(__file__).parents[2] / "deploy" / "docker"
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_PAIRED = {"ENV", "LABEL"}
KNOWN = {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "LABEL", "USER", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "CMD"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One instruction of a Dockerfile."""

    name: str
    words: tuple[str, ...]
    flags: Mapping[str, str]
    line: int

    @property
    def pairs(self) -> dict[str, str]:
        """Of ENV and LABEL."""
        return dict(zip(self.words[::2], (_bare(word) for word in self.words[1::2]), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """From one FROM to the next."""

    name: str
    base: str
    """Of another stage, or of an image."""
    steps: list[Step] = field(default_factory=list)

    def last(self, name: str) -> Step | None:
        """The instruction that counts, of those of which only one does."""
        return next((step for step in reversed(self.steps) if step.name == name), None)


def read(path: Path) -> dict[str, Stage]:
    """Stages by name, in the file's order."""
    outside: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for command in dockerfile.parse_file(str(path)):
        name, words = command.cmd.upper(), command.value
        assert name in KNOWN, f"{path.name}:{command.start_line}: nobody here knows how {name} is done"
        flags = dict(flag.removeprefix("--").split("=", 1) for flag in command.flags)
        step = Step(name=name, words=words, flags=flags, line=command.start_line)
        if name == "FROM":
            base, _, alias = words
            stages[alias] = Stage(name=alias, base=expand(base, outside))
        elif not stages:
            outside |= argument(step, {})
        else:
            [*_, current] = stages.values()
            current.steps.append(_with_default(step, outside))
    return stages


def argument(step: Step, given: Mapping[str, str]) -> dict[str, str]:
    """Of an ARG: its name and its value; nothing without either a value or a default, as for a builder."""
    name, is_default, default = step.words[0].partition("=")
    return {name: given.get(name, _bare(default))} if is_default or name in given else {}


def _with_default(step: Step, outside: Mapping[str, str]) -> Step:
    """An ARG that says no default has the one from before the first stage."""
    if step.name != "ARG" or "=" in step.words[0] or step.words[0] not in outside:
        return step
    return replace(step, words=(f"{step.words[0]}={outside[step.words[0]]}",))


def lineage(stages: Mapping[str, Stage], name: str) -> list[Stage]:
    """A stage and those that it grew from, the first one first."""
    stage = stages[name]
    return [*lineage(stages, stage.base), stage] if stage.base in stages else [stage]


def needed(stages: Mapping[str, Stage], target: str) -> list[str]:
    """What has to be built for a target, in order."""
    wanted: set[str] = set()

    def want(name: str) -> None:
        if name in wanted or name not in stages:
            return
        wanted.add(name)
        want(stages[name].base)
        for step in stages[name].steps:
            want(step.flags.get("from", ""))

    want(target)
    return [name for name in stages if name in wanted]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """As instructions other than RUN have theirs put in."""
    return _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], ""), text)


def _bare(word: str) -> str:
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word
