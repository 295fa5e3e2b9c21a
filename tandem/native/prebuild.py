"""`python -m tandem.native.prebuild MODULE… ROOT`: compiles modules' native code for the installation at ROOT.

For images and packages, whose machines have no compiler or should not wait for it; `ROOT` is what `sys.prefix` will be
there. The modules are imported in this order. One that has code of its own has a `RECIPE`, or a `recipe()` where that
depends on libraries which other modules bring, as the kernels' does on torch's.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.native.build import Recipe, prebuild


def main(modules: Sequence[str], root: Path) -> None:
    """Compile, and print where the libraries are."""
    recipes: list[Recipe] = []
    for module in map(importlib.import_module, modules):
        if hasattr(module, "RECIPE"):
            recipes.append(module.RECIPE)
        elif hasattr(module, "recipe"):
            recipes.append(module.recipe())
    for recipe in recipes:
        for library in prebuild(recipe, root):
            print(library)  # noqa: T201  # the command's output


if __name__ == "__main__":
    main(sys.argv[1:-1], Path(sys.argv[-1]))
