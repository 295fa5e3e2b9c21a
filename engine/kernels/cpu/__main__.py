"""`python -m engine.kernels.cpu`: compiles the CPU kernels now rather than at a worker's first start."""

import sys
import time

import torch  # noqa: F401 - its OpenMP runtime is the one that the kernels link

from engine.kernels.cpu.build import KernelsUnavailable
from engine.kernels.cpu.library import load_kernels


def main() -> int:
    """Build the kernels and print the processor's features. Returns 1 when nothing can be built here."""
    started_s = time.monotonic()
    try:
        library = load_kernels()
    except KernelsUnavailable as unavailable:
        sys.stderr.write(f"no compiled CPU kernels: {unavailable}\n")
        return 1
    offered = [name for name in library.features.__slots__ if getattr(library.features, name)]
    seconds = time.monotonic() - started_s
    sys.stdout.write(f"CPU kernels ready in {seconds:.1f} s ({', '.join(offered)})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
