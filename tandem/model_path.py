"""Where the served model's files are."""

from pathlib import Path

from tandem.errors import ConfigError

BUILTIN = "builtin"
BUILTIN_NAME = "tandem-tiny"


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
    """What clients call the model."""
    return name or (BUILTIN_NAME if path == BUILTIN else Path(path).name)
