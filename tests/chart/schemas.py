"""Whether an object is what Kubernetes and the operators of custom resources take, with no field unknown to them."""

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

KUBERNETES = ("1.31.0", "1.32.0", "1.33.0")
_OWN_GROUPS = ("apps/v1", "v1", "policy/v1", "autoscaling/v2")
_CUSTOM = ("gateway.", "leaderworkerset.")
"""Groups of custom resources that are named as Kubernetes' own are."""
Object = Mapping[str, Any]


def mistakes(one: Object, version: str) -> Iterator[str]:
    """What is wrong with an object, each beginning with its name and the place."""
    name = f"{one['kind']}/{one['metadata']['name']}"
    for pod in _pods_within(one):
        # Of a custom resource that holds pods they are checked as Kubernetes' own.
        known = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "within"}, "template": pod}
        for error in _validator("PodTemplate", "v1", version).iter_errors(known):
            yield f"{name} for {version}: {'.'.join(map(str, error.path))}: {error.message}"
    for error in _validator(one["kind"], one["apiVersion"], version).iter_errors(_checked(one)):
        yield f"{name} for {version}: {'.'.join(map(str, error.path))}: {error.message}"


def _pods_within(one: Object) -> Iterator[Object]:
    if one["kind"] == "LeaderWorkerSet":
        template = one["spec"]["leaderWorkerTemplate"]
        yield from (template["leaderTemplate"], template["workerTemplate"])


def is_custom(one: Object) -> bool:
    api = one["apiVersion"]
    return (api not in _OWN_GROUPS and not api.partition("/")[0].endswith(".k8s.io")) or api.startswith(_CUSTOM)


def _checked(one: Object) -> Any:
    return one.get("spec") if is_custom(one) else one


@cache
def _validator(kind: str, api: str, version: str) -> Draft202012Validator:
    if is_custom({"apiVersion": api}):
        return _custom(kind, api)
    # As kubernetes_validate does, which would read the definitions again for each object.
    short = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api)
    schema = schema_contents(f"kubernetes-json-schema/v{version}-local-strict/{kind.lower()}-{short}.json", version)
    registry = Resource.from_contents(schema) @ _definitions(version)
    return Draft202012Validator(schema, registry=registry)


@cache
def _definitions(version: str) -> Registry:
    path = f"kubernetes-json-schema/v{version}-local-strict/_definitions.json"
    return Resource.from_contents(schema_contents(path, version)) @ Registry()


def _custom(kind: str, api: str) -> Draft202012Validator:
    known = yaml.safe_load((Path(__file__).parent / "crds.yaml").read_text(encoding="utf-8"))
    schema = known["kinds"][f"{kind}/{api}"] | {"definitions": known["definitions"]}
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)
