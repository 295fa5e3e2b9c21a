"""docs/extend/incidents.md says what proves that peers' incidents cannot happen here, docs/operate/bad_inputs.md what
proves that bad input harms nothing: what they name must be there.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/extend/incidents.md"
_NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
_REASON = "no test: "
NUM_BAD_INPUTS = 70
"""What the list has that the page answers."""


def rows(page: str) -> Iterator[tuple[str, str, str]]:
    """Incident, claim, and its proofs."""
    for line in page.splitlines():
        if line.startswith("|"):
            incident, held, proved = (cell.strip() for cell in line.strip("|").split("|"))
            if incident not in ("incident", "bad input", "---"):
                yield incident, held, proved


def named_in(path: Path) -> set[str]:
    """Names of the functions that pytest runs in a file, which is read and not run."""
    tree = ast.parse(path.read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
    }


def problems(page: str) -> list[str]:
    """The errors of such a page."""
    found = []
    for incident, held, proved in rows(page):
        named = _NAMED.findall(proved)
        if not held or not (named or (proved.startswith(_REASON) and len(proved) > len(_REASON))):
            found.append(f"{incident}: neither a test nor a reason")
        if not proved.startswith(_REASON) and (rest := _NAMED.sub("", proved).strip()):
            found.append(f"{incident}: {rest!r} names no test")
        found += [
            f"{incident}: no test {path}::{name}"
            for path, name in named
            if not (ROOT / path).is_file() or name not in named_in(ROOT / path)
        ]
    return found


def test_incidents_page_names_existing_tests() -> None:
    page = PAGE.read_text()
    assert len(list(rows(page))) >= 21
    assert problems(page) == []


def test_bad_inputs_page_names_existing_tests() -> None:
    page = (ROOT / "docs/operate/bad_inputs.md").read_text()
    assert len(list(rows(page))) >= NUM_BAD_INPUTS
    assert problems(page) == []


HERE = "tests/unit/docs/test_incidents.py"


@pytest.mark.parametrize(
    ("proved", "wrong"),
    [
        (f"`{HERE}::test_incidents_page_names_existing_tests`", ""),
        ("no test: there is no such part here", ""),
        ("", "neither a test nor a reason"),
        ("no test: ", "neither a test nor a reason"),
        (f"`{HERE}::test_of_something_else`", "no test tests/unit"),
        (f"`{HERE}::named_in`", "no test tests/unit"),
        ("`tests/unit/test_nowhere.py::test_it`", "no test tests/unit/test_nowhere.py"),
        (f"`{HERE}::test_incidents_page_names_existing_tests` and some others", "names no test"),
        ("`test_incidents_page_names_existing_tests`", "neither a test nor a reason"),
    ],
)
def test_incident_page_check_finds_missing_tests(proved: str, wrong: str) -> None:
    found = problems(f"| peer#1: it broke | it holds | {proved} |")
    assert [wrong in one for one in found[:1]] == [True] * bool(wrong)
