"""Safe access to a model directory, which may be hostile: which files may be opened, and how large a JSON may be.

A file may lie in the directory itself or, when the directory is a snapshot in a Hugging Face hub cache
(`models--org--name/snapshots/<revision>`), anywhere in that model's own folder, where snapshots link to
`../../blobs`. Any other link is refused, and so is everything that is not a regular file (a FIFO would hang).

A GGUF file may be a link: the user named it. Its JSON files are those that `tandem.model_files` makes of it.
"""

import os
import stat
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError
from tandem.model_files import GGUF_SUFFIX, has_model_file, is_gguf_file, parse_json_object, read_model_file

MAX_JSON_BYTES = 64 * 2**20


class ModelDirectory:
    """Resolves and reads the files of one model, which may be a GGUF file alone."""

    def __init__(self, path: str | Path) -> None:
        self._is_file = is_gguf_file(Path(path))
        self.root = Path(path) if self._is_file else Path(os.path.realpath(path))
        if not self._is_file and not self.root.is_dir():
            raise ConfigError(f"model directory {path} does not exist or is not a directory")
        self._allowed = _allowed_root(self.root)

    def has(self, name: str) -> bool:
        """Whether a directory entry of that name exists; `resolve` checks whether it is safe."""
        return has_model_file(self.root / name) if self._is_file else os.path.lexists(self.root / name)

    def names(self, suffix: str) -> list[str]:
        """File names ending in `suffix`, sorted."""
        return sorted(entry.name for entry in self.root.iterdir() if entry.name.endswith(suffix))

    def gguf_path(self) -> Path | None:
        """The file that holds the weights in GGUF; None where they are in safetensors. Raises ConfigError for several,
        and as `resolve`.
        """
        if self._is_file:
            return self.root
        found = self.names(GGUF_SUFFIX)
        if not found or any(name.startswith("model.safetensors") for name in self.names("")):
            return None
        if len(found) > 1:
            raise ConfigError(f"model directory: {len(found)} GGUF files ({found[0]}, …): one has to hold all weights")
        return self.resolve(found[0])

    def resolve(self, name: str) -> Path:
        """Real path of a file by its plain name; ConfigError when it is missing, special, or outside."""
        if name != os.path.basename(name) or name in {"", ".", ".."} or "\0" in name:
            raise ConfigError(f"model directory: {name!r} is not a plain file name")
        return self._resolve(name)

    def resolve_in(self, folder: str, name: str) -> Path:
        """Real path of a file in a folder of the directory, both by plain names. Raises as `resolve`."""
        for part in (folder, name):
            if part != os.path.basename(part) or part in {"", ".", ".."} or "\0" in part:
                raise ConfigError(f"model directory: {part!r} is not a plain name")
        return self._resolve(os.path.join(folder, name))

    def _resolve(self, name: str) -> Path:
        real = Path(os.path.realpath(self.root / name))
        if not real.is_relative_to(self._allowed):
            raise ConfigError(f"model directory: {name} is a link out of the directory")
        try:
            mode = real.stat().st_mode
        except OSError as error:
            raise ConfigError(f"model directory: {name} is missing") from error
        if not stat.S_ISREG(mode):
            raise ConfigError(f"model directory: {name} is not a regular file")
        return real

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON object. Raises ConfigError when it is too large, malformed, or something else."""
        path = self.root / name if self._is_file else self.resolve(name)
        return parse_json_object(read_model_file(path, max_bytes=MAX_JSON_BYTES), name)


def _allowed_root(root: Path) -> Path:
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        return root.parent.parent
    return root
