"""The location of the served model's files, and its name."""

from pathlib import Path

from tandem.errors import ConfigError
from tandem.model_files import GGUF_SUFFIX, is_gguf_file

BUILTIN = "builtin"
BUILTIN_NAME = "tandem-tiny"
BUILTIN_DTYPE = "float32"
"""Default dtype of the built-in model, whatever its file holds: the demo's output is exact."""
MAX_NAME_CHARS = 200


def model_directory(path: str) -> Path:
    """The directory of `model.path`, or the GGUF file that takes its place: `tandem.model_files` reads either.

    Raises ConfigError when there is neither.
    """
    if path == BUILTIN:
        # Shipped as data beside the engine; found by place, since the router must not import the engine.
        return Path(__file__).resolve().parent.parent / "engine" / "builtin_model"
    directory = Path(path)
    if not is_local_model(path):
        raise ConfigError(
            f"model.path: {path} is neither a directory nor a {GGUF_SUFFIX} file "
            "(`tandem up` fetches hub ids before it starts workers)"
        )
    return directory


def is_local_model(path: str) -> bool:
    """Whether the model's files are on this machine: in a directory, or in one GGUF file."""
    return path == BUILTIN or Path(path).is_dir() or is_gguf_file(Path(path))


def model_name(path: str, name: str | None) -> str:
    """The name of the model for clients. Raises ConfigError when its directory's name is not a valid one."""
    if name or path == BUILTIN:
        return name or BUILTIN_NAME
    try:
        return checked_name(default_name(path))
    except ValueError as error:
        raise ConfigError(f"model.path: {error}; set model.name") from None


def default_name(path: str) -> str:
    """The last part of a model's path, for a GGUF file without its suffix."""
    return Path(path).name.removesuffix(GGUF_SUFFIX)


def checked_name(name: str) -> str:
    """Check a name that appears in answers, URLs, metrics and logs. Raises ValueError."""
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise ValueError(f"a model's name must have 1 to {MAX_NAME_CHARS} characters")
    if not (name.isprintable() and name.isascii()) or name != name.strip():
        raise ValueError("a model's name must be printable ASCII without leading or trailing spaces")
    return name
