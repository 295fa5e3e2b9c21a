"""Keeps a revision as the version before this one: `python -m tests.previous REVISION`, in a checkout with its history.

Run it for the last commit of a version when the next one begins; commit what it writes to `tests/previous/data`.
"""

import json
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path

from tests.previous import release
from tests.previous.revision import extract, git, python, unpack


def main(revision: str) -> None:
    """All three files, anew."""
    commit = git("rev-parse", revision).decode().strip()
    release.DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder)
        unpack(commit, code)
        shutil.copytree(Path(__file__).with_name("samples"), code / release.SAMPLES_INSIDE)
        release.ARCHIVE.write_bytes(_packed(code))
        samples = {"commit": commit} | json.loads(python(code, "-m", release.SAMPLES_INSIDE, "write"))
        release.SAMPLES.write_text(json.dumps(samples, indent=0) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        extract(commit, Path(folder), "proto")
        sources = sorted(str(path) for path in (Path(folder) / "proto/tandem/v1").glob("*.proto"))
        out = f"--descriptor_set_out={release.DESCRIPTORS}"
        command = [sys.executable, "-m", "grpc_tools.protoc", "-I", f"{folder}/proto", out, *sources]
        subprocess.run(command, check=True)
    print(f"{commit[:12]} speaks {samples['spoken']}; its code takes {release.ARCHIVE.stat().st_size} bytes")


def _packed(code: Path) -> bytes:
    """The same bytes for the same files."""
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(path for path in code.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
            member = tarfile.TarInfo(str(path.relative_to(code)))
            member.size, member.mode = path.stat().st_size, 0o644
            with path.open("rb") as file:
                archive.addfile(member, file)
    return lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME)


if __name__ == "__main__":
    main(*sys.argv[1:])
