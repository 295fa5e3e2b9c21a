"""Does what a Dockerfile says: its own RUN and COPY, one after the other, in layers."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.images.dockerfile import Stage, Step, argument, expand, lineage, needed, read
from tests.images.layers import Layers, inherited_variables, start

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What a target became."""

    layers: tuple[Path, ...]
    variables: Mapping[str, str]
    user: str
    folder: str
    labels: Mapping[str, str]
    health: tuple[str, ...]
    command: tuple[str, ...]


class _Built:
    """A stage on its way."""

    def __init__(self, parents: "tuple[Path, ...]", top: Path, root: Path) -> None:
        self.layers, self.root = (*parents, top), root
        self.variables: dict[str, str] = {"PATH": _PATH}
        self.arguments: dict[str, str] = {}
        self.folder, self.user = "/", "0"


def build(path: Path, target: str, context: Path, layers: Layers, given: Mapping[str, str] | None = None) -> Image:
    """All stages that the target needs. Raises RuntimeError for a step that fails, as a builder would."""
    stages, built = read(path), dict[str, _Built]()
    for name in needed(stages, target):
        before = built.get(stages[name].base)
        parents = before.layers if before else (layers.base,)
        new = _Built(parents, *layers.grow(parents, name))
        if before:
            new.variables, new.folder, new.user = dict(before.variables), before.folder, before.user
        for step in stages[name].steps:
            _do(step, new, context, built, given or {}, where=f"{path.name}:{step.line}")
        built[name] = new
    return _image(built[target], lineage(stages, target))


def _do(
    step: Step, stage: _Built, context: Path, built: Mapping[str, _Built], given: Mapping[str, str], *, where: str
) -> None:
    seen = stage.arguments | stage.variables
    match step.name:
        case "ARG":
            stage.arguments |= argument(step, given)
        case "ENV":
            stage.variables |= {name: expand(value, seen) for name, value in step.pairs.items()}
        case "WORKDIR":
            stage.folder = expand(step.words[0], seen)
            (stage.root / stage.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        case "USER":
            stage.user = step.words[0]
        case "COPY":
            source = built[step.flags["from"]].root if "from" in step.flags else context
            _copy(source, step.words, stage)
        case "RUN":
            _run(step, stage, inherited_variables() | seen, where)
        case _:
            pass  # about the image, not its files


def _copy(source: Path, words: tuple[str, ...], stage: _Built) -> None:
    *names, to = words
    into = stage.root / (Path(stage.folder) / to).as_posix().lstrip("/")
    for name in names:
        one = source / name.lstrip("/")
        is_whole = one.is_dir()
        (into if is_whole or to.endswith("/") or len(names) > 1 else into.parent).mkdir(parents=True, exist_ok=True)
        origin = f"{one}/." if is_whole else str(one)
        subprocess.run(
            ["cp", "--no-dereference", "--recursive", "--preserve=mode,timestamps,links", origin, str(into)], check=True
        )


def _run(step: Step, stage: _Built, variables: Mapping[str, str], where: str) -> None:
    print(f"# {where} RUN", file=sys.stderr, flush=True)
    user = int(stage.user.split(":")[0])
    command = ["/bin/sh", "-c", step.words[0]]
    code = start(stage.root, command, variables, folder=stage.folder, user=user).wait()
    if code != 0:
        raise RuntimeError(f"{where}: exit code {code}")


def _image(built: _Built, stages: list[Stage]) -> Image:
    def last(name: str) -> tuple[str, ...]:
        found = [step for stage in stages if (step := stage.last(name))]
        return found[-1].words if found else ()

    labels = {
        name: expand(value, built.arguments)
        for stage in stages
        if (step := stage.last("LABEL"))
        for name, value in step.pairs.items()
    }
    return Image(
        layers=built.layers,
        variables=built.variables,
        user=built.user,
        folder=built.folder,
        labels=labels,
        health=last("HEALTHCHECK"),
        command=last("CMD"),
    )
