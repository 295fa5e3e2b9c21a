"""`python -m cluster.reference`: generates the pages of the documentation that are made from the code."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.reference import configuration, families, metrics

ROOT = Path(__file__).resolve().parents[2]
PAGES: Mapping[str, tuple[Path, Callable[[], str]]] = {
    "configuration": (ROOT / "docs/operate/configuration.md", configuration.render),
    "families": (ROOT / "docs/use/families.md", families.render),
    "metrics": (ROOT / "docs/operate/metrics.md", metrics.render),
}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m cluster.reference", description="write the generated pages")
    made.add_argument("pages", nargs="*", metavar="PAGE", help=f"{' or '.join(PAGES)}; all when none is named")
    made.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page is stale")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or with --check print which are stale."""
    given = parser().parse_args(arguments)
    if unknown := sorted(set(given.pages) - PAGES.keys()):
        print(f"unknown page {unknown[0]}: expected {' or '.join(PAGES)}", file=sys.stderr)
        return 2
    stale = []
    for name in given.pages or PAGES:
        path, render = PAGES[name]
        text = render()
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not given.check:
            path.write_text(text, encoding="utf-8")
        print(f"{'stale' if given.check else 'written'}: {path.relative_to(ROOT)}")
    if stale and given.check:
        print("run `make docs` and commit what it writes")
    return 1 if stale and given.check else 0


if __name__ == "__main__":
    sys.exit(main())
