"""`python -m tandem.native.prebuild MODULE ROOT`: compiles the `RECIPE` of a module for the installation at ROOT.

For images and packages whose machines have no compiler; `ROOT` is what `sys.prefix` will be there.
"""

import importlib
import sys
from pathlib import Path

from tandem.native.build import prebuild


def main() -> None:
    """Compile, and print where the library is."""
    _, module, root = sys.argv
    print(prebuild(importlib.import_module(module).RECIPE, Path(root)))  # noqa: T201  # the command's output


if __name__ == "__main__":
    main()
