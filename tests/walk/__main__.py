"""Follows one chat request and its hand-off through a live cluster: `python -m tests.walk [--all]`.

Prints each stay in a file and what the request becomes there, as `tests.walk.ways` counts them. Exit 1 when the request
has more than 12 stays or 10 objects. `--all`: every call, and whether it is on the way.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path

from cluster.processes.effective_config import module_command
from cluster.supervisor.supervisor import ProcessPlan
from tests.support.running_cluster import WAIT_S, running
from tests.walk.recorded import MARK, TEMPERATURE
from tests.walk.ways import MOST_OBJECTS, MOST_STAYS, REQUEST, WAYS, Call, Walk, walk

_WORDS = 60
"""Long enough for a hand-off."""


async def follow(folder: Path) -> dict[str, list[Call]]:
    """The ways of one request, by name: the second one's, when whatever is made once has been made."""

    def command(plan: ProcessPlan, config: Path, ready_fd: int) -> list[str]:
        python, dash_m, *rest = module_command(plan, config, ready_fd)
        return [python, dash_m, "tests.walk.recorded", str(folder), *rest]

    async with running(command=command) as cluster:
        for process in cluster.local.processes:
            cluster.local.kill(process.name, signal.SIGUSR1)
        for word in ("wombat", MARK):
            for way in WAYS:
                (folder / f"{way.name}.json").unlink(missing_ok=True)
            body = {
                "messages": [{"role": "user", "content": f"{word} " * _WORDS}],
                "max_tokens": 4,
                "temperature": TEMPERATURE,
                "stream": True,
            }
            answer = await cluster.http.post("/v1/chat/completions", json=body)
            answer.raise_for_status()
            async with asyncio.timeout(WAIT_S):
                while not all((folder / f"{way.name}.json").exists() for way in WAYS):  # noqa: ASYNC110 - others write
                    await asyncio.sleep(0.05)
    return {
        way.name: [Call.from_json(call) for call in json.loads((folder / f"{way.name}.json").read_text())]
        for way in WAYS
    }


def report(title: str, found: Walk) -> str:
    """One way, as it is printed."""
    lines = [f"{title}: {len(found.stays)} stays, {found.num_objects} objects"]
    for number, stay in enumerate(found.stays, 1):
        names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in stay.functions))
        becomes = f"  -> {', '.join(stay.made)}" if stay.made else ""
        lines.append(f"{number:4} {stay.file}: {names}{becomes}")
    lines.append(f"     objects: {_counted(found.objects)}")
    lines.append(f"     parts of them, not counted: {_counted(found.parts)}")
    lines.append(f"     asked on the way, not counted: {found.asides.total()} calls into {len(found.asides)} files")
    return "\n".join(lines)


def _counted(kinds: Counter[str]) -> str:
    return ", ".join(kind if count == 1 else f"{kind} x{count}" for kind, count in kinds.items()) or "none"


def _tree(call: Call, depth: int = 0) -> str:
    made = f" -> {', '.join(call.made)}" if call.made else ""
    line = f"{'*' if call.is_on_way else ' '} {'  ' * depth}{call.file} {call.function}{made}"
    return "\n".join([line, *(_tree(inner, depth + 1) for inner in call.calls)])


def main() -> int:
    """Follow the requests, print their ways, and return 1 if one is too long."""
    parser = argparse.ArgumentParser(prog="python -m tests.walk", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every call, those on the way marked with *")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calls = asyncio.run(follow(Path(folder)))
    for way in WAYS:
        if options.all:
            print("\n".join(map(_tree, calls[way.name])))
        print(report(way.title, walk(calls[way.name])), end="\n\n")
    request = walk(calls[REQUEST.name])
    if len(request.stays) > MOST_STAYS or request.num_objects > MOST_OBJECTS:
        print(f"more than {MOST_STAYS} stays or {MOST_OBJECTS} objects for the request", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
