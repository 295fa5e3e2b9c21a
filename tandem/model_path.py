"""The location of the served model's files, and its name."""

from pathlib import Path

from tandem.errors import ConfigError

BUILTIN = "builtin"
BUILTIN_NAME = "tandem-tiny"
BUILTIN_DTYPE = "float32"
"""Default dtype of the built-in model, whatever its file holds: the demo's output is exact."""
MAX_NAME_CHARS = 200


def model_directory(path: str) -> Path:
    """The directory of `model.path`. Raises ConfigError when there is none."""
    if path == BUILTIN:
        # Shipped as data beside the engine; found by place, since the router must not import the engine.
        return Path(__file__).resolve().parent.parent / "engine" / "builtin_model"
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(
            f"model.path: {path} is not a directory (`tandem up` fetches hub ids before it starts workers)"
        )
    return directory


def model_name(path: str, name: str | None) -> str:
    """The name of the model for clients. Raises ConfigError when its directory's name is not a valid one."""
    if name or path == BUILTIN:
        return name or BUILTIN_NAME
    try:
        return checked_name(Path(path).name)
    except ValueError as error:
        raise ConfigError(f"model.path: {error}; set model.name") from None


def checked_name(name: str) -> str:
    """Check a name that appears in answers, URLs, metrics and logs. Raises ValueError."""
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise ValueError(f"a model's name must have 1 to {MAX_NAME_CHARS} characters")
    if not (name.isprintable() and name.isascii()) or name != name.strip():
        raise ValueError("a model's name must be printable ASCII without leading or trailing spaces")
    return name
