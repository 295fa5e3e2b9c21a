"""Regenerates the gRPC stubs into a temporary folder and fails when the committed ones differ."""

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> int:
    """0 when the committed stubs are what the .proto files generate."""
    sources = sorted(str(p) for p in (ROOT / "proto/tandem/v1").glob("*.proto"))
    with tempfile.TemporaryDirectory() as out:
        outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(ROOT / "proto"), *outputs, *sources]
        subprocess.run(command, check=True)
        fresh = Path(out) / "tandem/v1"
        (fresh / "common_pb2_grpc.py").unlink()
        names = {p.name for p in fresh.iterdir()}
        committed = {p.name for p in (ROOT / "tandem/v1").glob("*_pb2*")}
        _, changed, missing = filecmp.cmpfiles(fresh, ROOT / "tandem/v1", names | committed, shallow=False)
    wrong = sorted({*changed, *missing})
    print("stubs differ, run `make proto`: " + ", ".join(wrong) if wrong else f"{len(names)} stub files are fresh")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
