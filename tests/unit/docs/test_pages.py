"""The pages name only existing things, generated ones are fresh, and the index lists them all."""

import ast
import json
import re
from pathlib import Path

import pytest
import yaml

from cluster.reference import configuration, metrics
from cluster.reference.__main__ import PAGES as GENERATED
from cluster.reference.__main__ import main
from tests.previous.revision import git

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])
MAX_README_LINES = 120
_TREES = "tandem|engine|kv_transfer|worker|router|prefill_worker|decode_worker|cluster|tandem_bench|training|tests|helm"
_TREES += "|deploy|proto|docs"
_FILE = re.compile(r"[\w./*-]*\w\.(py|cpp|h|proto|sh)|[\w*-]+(/[\w.*-]+)+\.(yaml|json|md|toml|txt)")
_FOLDER = re.compile(rf"({_TREES})(/[\w*-]+)+/?")
_NOT_OURS = {"deploy/data", "deploy/secrets", "__init__.py"}
"""What a user's own run makes, and what is in every package."""


def text_of(page: Path) -> str:
    """Return a page's text without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def unreadable(text: str) -> list[str]:
    """Errors of the fenced blocks that say they are YAML or JSON."""
    found = []
    for kind, block in re.findall(r"^```(ya?ml|json)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        try:
            json.loads(block) if kind == "json" else list(yaml.safe_load_all(block))
        except (ValueError, yaml.YAMLError) as error:
            found.append(f"{error} in\n{block}")
    return found


def dangling(page: Path, text: str) -> list[str]:
    """Broken links of a page at this place."""
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and anchor not in anchors(text_of(path) if name else text)):
            found.append(link)
    return found


def absent(text: str) -> list[str]:
    """Files and folders in backticks that are missing from the repository."""
    words = {word.split("::")[0] for word in re.findall(r"`([^`\s]+)`", text)}
    named = {word for word in words if _FILE.fullmatch(word) or _FOLDER.fullmatch(word)}
    return sorted(n for n in named - _NOT_OURS if not n.startswith("/") and not any(ROOT.glob(n.rstrip("/"))))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_has_no_merge_conflict_marker(page: Path) -> None:
    assert re.findall(r"^(?:<{7}|>{7}) .*$", page.read_text(encoding="utf-8"), re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert dangling(page, text_of(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_yaml_and_json_blocks_parse(page: Path) -> None:
    assert unreadable(page.read_text(encoding="utf-8")) == []


def test_block_check_finds_invalid_yaml_and_json() -> None:
    wrong = "```yaml\na:\n  - b: 1\n        c: 2\n```\n```json\n{'a': 1}\n```\n```\nplain: [\n```\n```yaml\na: 1\n```\n"
    assert len(unreadable(wrong)) == 2


def test_measurements_have_no_figure_of_a_scratch_program() -> None:
    page = (DOCS / "extend/measurements.md").read_text(encoding="utf-8")
    assert "scratch program" not in " ".join(page.split()), "such figures belong into measurement_history.md"


# What went where is about names that are no more.
@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.name != "moved.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_page_names_existing_files(page: Path) -> None:
    assert absent(text_of(page)) == []


def test_page_check_finds_missing_files_and_links() -> None:
    assert absent("`engine/nothing.py` and `nothing.py`, `router/http`, `engine/gone`, `engine.stall_s`") == [
        "engine/gone",
        "engine/nothing.py",
        "nothing.py",
    ]
    page = DOCS / "README.md"
    assert dangling(
        page, "[a](use/nothing.md) [b](use/api.md#nothing) [c](#here) [d](https://example.com)\n# Here"
    ) == [
        "use/nothing.md",
        "use/api.md#nothing",
    ]


def test_docs_index_lists_each_page_once() -> None:
    links = re.findall(r"^\| \[[^\]]+\]\(([^)#]+\.md)\) \|", (DOCS / "README.md").read_text(), re.MULTILINE)
    below = [str(p.relative_to(DOCS)) for p in DOCS.rglob("*.md") if p.parent.name != "adr" and p.parent != DOCS]
    assert len(set(links)) == len(links)
    assert set(links) == set(below)


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("name", GENERATED)
def test_generated_page_is_fresh(name: str) -> None:
    path, render = GENERATED[name]
    assert path.read_text(encoding="utf-8") == render(), "stale: run `make docs` and commit what it writes"


def test_check_of_a_stale_page_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = tmp_path / "metrics.md"
    stale.write_text("old")
    monkeypatch.setattr("cluster.reference.__main__.ROOT", tmp_path)
    monkeypatch.setitem(GENERATED, "metrics", (stale, metrics.render))  # type: ignore[misc]
    assert main(["metrics", "--check"]) == 1
    assert "stale: metrics.md" in capsys.readouterr().out
    assert stale.read_text() == "old"
    assert main(["metrics"]) == 0
    assert main(["metrics", "--check"]) == 0
    assert main(["metric"]) == 2


def test_configuration_page_describes_every_key() -> None:
    keys = dict(configuration.keys())
    assert len(keys) > 120
    assert {"engine.max_step_s", "router.tls.cert", "router.api_keys[].tenant", "redis.url"} <= keys.keys()
    assert "router.limits.tenants.NAME.weight" in keys
    assert [name for name, description in keys.items() if not description] == []


def test_moved_page_points_to_existing_modules() -> None:
    page = (DOCS / "extend/moved.md").read_text(encoding="utf-8")
    now = re.findall(r"^\| `[^`]+` \| `([^`]+)` \|$", page, re.MULTILINE)
    assert len(now) > 700
    assert [path for path in now if not (ROOT / path).is_file()] == []


@pytest.mark.slow  # a checkout without its history would not do
def test_moved_page_lists_every_removed_module() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (DOCS / "extend/moved.md").read_text(encoding="utf-8"), re.MULTILINE)
    before = git("ls-tree", "-r", "--name-only", "e0640af").decode().split()
    gone = [
        path
        for path in before
        if path.endswith(".py") and not path.startswith("tests/") and not path.endswith("__init__.py")
        if "_pb2" not in path and not (ROOT / path).is_file()
    ]
    assert len(gone) > 700
    assert sorted(set(gone).difference(rows)) == []


def test_configuration_page_states_type_bounds_and_default() -> None:
    page = configuration.render()
    assert "| `lease_s` | number (≥ 0.5, ≤ 3,600) | `2.0` |" in page
    assert "| `block_size` | `16`, `32`, `64` | `16` |" in page
    assert "| `cert` | text | required |" in page
    assert "See [`router.tls`](#routertls)." in page


def test_metrics_page_has_every_name_in_the_code() -> None:
    page = metrics.render()
    known = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    literals = {
        node.value
        for folder in ("router", "cluster/autoscaler")
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    named = {text for text in literals if re.fullmatch(r"(tandem_|vllm:|gen_ai_server_)[a-z0-9_]+", text)}
    assert len(named) > 90
    named -= {"tandem_loop_budget", "tandem_worker", "tandem_worker_cache_", "tandem_audit_entry"}  # no whole metrics
    assert sorted(n for n in named if n not in known and f"{n}_total" not in known) == []
    assert "| `tandem_worker_transfer_blocks` | gauge | `worker`, `role`, `state` | KV blocks held by transfers" in page
