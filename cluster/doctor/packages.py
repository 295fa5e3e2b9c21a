"""Check of installed packages for `tandem doctor`: all that Tandem declares to require, in versions that it allows."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from cluster.distribution import NAME, declared_requirements, extras_of, installed_version
from cluster.doctor.findings import Finding, Status
from tandem.config.cluster import ClusterConfig
from tandem.model_path import is_local_model

if TYPE_CHECKING:
    from packaging.requirements import Requirement

ROUTERS_DO_WITHOUT = frozenset({"isal", "safetensors", "torch"})
"""What only workers import: a router's image has none of them (deploy/docker/locks/router-excludes.txt)."""
_ROUTERS_EXTRAS = ("redis", "hub", "telemetry", "ray")
_WORKERS_EXTRAS = ("nixl", "gpu")
_OTHER_EXPORTER = {
    "grpc": "opentelemetry-exporter-otlp-proto-http",
    "http/protobuf": "opentelemetry-exporter-otlp-proto-grpc",
}
"""What a protocol of telemetry does without."""


def packages(config: ClusterConfig) -> list[Finding]:
    """Check the packages that routers and workers need."""
    return _check(config, (*_ROUTERS_EXTRAS, *_WORKERS_EXTRAS), without=frozenset())


def router_packages(config: ClusterConfig) -> list[Finding]:
    """Check the packages that a router needs."""
    return _check(config, _ROUTERS_EXTRAS, without=ROUTERS_DO_WITHOUT)


def _check(config: ClusterConfig, extras: Iterable[str], *, without: frozenset[str]) -> list[Finding]:
    declared = declared_requirements()
    if declared is None:
        detail = f"not checked: no metadata of {NAME} is installed, which lists them"
        return [Finding(name="packages", status=Status.WARN, detail=detail, hint=f"`pip install {NAME}`")]
    wanted = [one for one in declared.always if one.name not in without]
    wrong = _faults(wanted, are_needed=True)
    if wrong:
        hint = f"`make setup`, or `pip install {NAME}`"
        found = [Finding(name="packages", status=Status.FAIL, detail="; ".join(wrong), hint=hint)]
    else:
        detail = f"all {len(wanted)} that {declared.source} requires are installed"
        found = [Finding(name="packages", status=Status.OK, detail=detail)]
    for extra in extras:
        found.extend(_check_extra(config, extra, declared.by_extra.get(extra, ())))
    return found


def _check_extra(config: ClusterConfig, extra: str, requirements: Iterable["Requirement"]) -> list[Finding]:
    """Report what is wrong with an extra: all that it lacks if the configuration needs it, else only unfit versions."""
    needed_by = _needing(config, extra)
    unused = _OTHER_EXPORTER.get(config.telemetry.otlp_protocol or "")
    whole = [more for one in requirements for more in (one, *extras_of(one)) if more.name != unused]
    wrong = _faults(whole, are_needed=needed_by is not None)
    if not wrong:
        return []
    status = Status.WARN if needed_by is None else Status.FAIL
    detail = "; ".join(wrong) if needed_by is None else f"for {needed_by}: {'; '.join(wrong)}"
    hint = f"`pip install '{NAME}[{extra}]'`"
    return [Finding(name=f"packages of the extra {extra}", status=status, detail=detail, hint=hint)]


def _needing(config: ClusterConfig, extra: str) -> str | None:
    """Return the setting that needs an extra; None if none does."""
    needing = {
        "redis": ("redis", config.redis.redis_settings() is not None),
        "hub": ("model.path", not is_local_model(config.model.path)),
        "telemetry": ("telemetry.otlp_endpoint", config.telemetry.otlp_endpoint is not None),
        "ray": ("ray.address", config.ray.address is not None),
        "nixl": ("transfer.transport", config.transfer.transport == "nixl"),
    }
    setting, is_set = needing.get(extra, ("", False))
    return setting if is_set else None


def _faults(requirements: Iterable["Requirement"], *, are_needed: bool) -> list[str]:
    """Name what is missing, where it is needed, and what is installed in a version that does not fit."""
    missing, unfit = [], []
    for one in requirements:
        version = installed_version(one.name)
        if version is None:
            missing.append(f"{one.name}{_bounds(one)}")
        elif not _fits(one, version):
            unfit.append(f"{one.name} {version}, which should be {_bounds(one).strip(' ()')}")
    found = [f"missing: {', '.join(missing)}"] if missing and are_needed else []
    return found + ([f"unfit: {'; '.join(unfit)}"] if unfit else [])


def _bounds(requirement: "Requirement") -> str:
    return f" ({requirement.specifier})" if requirement.specifier else ""


def _fits(requirement: "Requirement", version: str) -> bool:
    from packaging.version import InvalidVersion

    try:
        return requirement.specifier.contains(version, prereleases=True)
    except InvalidVersion:
        return False
