"""`python -m cluster.chart.schema`: generates the Helm chart's schema and defaults from the configuration models.

`values.schema.json` holds the chart's own values and, as `config`, the cluster's YAML without what the pods determine.
`files/defaults.yaml` holds every default of that YAML, for arithmetic in the templates.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from cluster.chart.values import ChartValues
from tandem.config.cluster import ClusterConfig, dump

CHART = Path(__file__).resolve().parents[2] / "helm" / "tandem"
DECIDED_BY_THE_CHART = (
    "ray",
    "secret",
    "cluster",
    "control_socket",
    "model.path",
    "engine.device",
    "transfer.tls",
    "router.host",
    "router.port",
    "router.grpc_port",
    "router.handover_socket",
    "router.api_keys",
    "router.api_keys_file",
    "router.tls",
    "prefill.host",
    "prefill.port",
    "prefill.addresses",
    "prefill.gpus",
    "prefill.nodes",
    "prefill.rank_port",
    "prefill.health_port",
    "prefill.join_s",
    "decode.host",
    "decode.port",
    "decode.addresses",
    "decode.gpus",
    "decode.nodes",
    "decode.rank_port",
    "decode.health_port",
    "decode.join_s",
    "telemetry.otlp_headers",
    "redis.url",
    "redis.password",
    "redis.ca",
    "redis.sentinels",
    "redis.sentinel_master",
    "redis.sentinel_username",
    "redis.sentinel_password",
)
"""Keys of the cluster's YAML that pods, Services and secrets determine."""
_Schema = dict[str, Any]


def values_schema() -> _Schema:
    own = _plain(ChartValues.model_json_schema(), "chart.")
    config = _plain(ClusterConfig.model_json_schema(), "config.")
    definitions = {**own.pop("$defs"), **config.pop("$defs")}
    for dotted in DECIDED_BY_THE_CHART:
        *sections, key = dotted.split(".")
        model = definitions[_model_of(config, sections[0])] if sections else config
        # Both pools share one model: what the first removes is gone from the second, too.
        model["properties"].pop(key, None)
    own["properties"]["config"] = config
    # Helm adds this key when the chart is a subchart.
    own["properties"]["global"] = {"type": "object"}
    # A draft that older versions of Helm support, too.
    return {"$schema": "http://json-schema.org/draft-07/schema#", **own, "$defs": definitions}


def defaults() -> str:
    """Render every default of the cluster's YAML."""
    return "# Made by `python -m cluster.chart.schema`.\n" + dump(ClusterConfig())


def rendered() -> dict[Path, str]:
    """Return the generated files and their content."""
    return {
        CHART / "values.schema.json": json.dumps(values_schema(), indent=1, sort_keys=True, ensure_ascii=False) + "\n",
        CHART / "files" / "defaults.yaml": defaults(),
    }


def _model_of(config: _Schema, section: str) -> str:
    return str(config["properties"][section]["$ref"]).removeprefix("#/$defs/")


def _plain(node: Any, prefix: str) -> Any:
    """Prefix the models' names, and drop defaults and required fields, which are the values file's."""
    if isinstance(node, list):
        return [_plain(one, prefix) for one in node]
    if not isinstance(node, dict):
        return node
    plain: _Schema = {}
    for key, value in node.items():
        if key in ("properties", "$defs"):  # the keys below are names, which may equal keywords such as `default`
            names = prefix if key == "$defs" else ""
            plain[key] = {f"{names}{name}": _plain(found, prefix) for name, found in value.items()}
        elif key == "$ref":
            plain[key] = f"#/$defs/{prefix}{str(value).removeprefix('#/$defs/')}"
        elif key not in ("default", "required", "title", "writeOnly"):
            plain[key] = _plain(value, prefix)
    return plain


def main() -> int:
    """Write the files, or with --check print which differ."""
    parser = argparse.ArgumentParser(
        prog="cluster.chart.schema", description="generate the chart's schema and defaults"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a file differs")
    check = parser.parse_args().check
    if not CHART.is_dir():
        parser.error(f"{CHART} does not exist: the Helm chart is in a clone of the repository, not in the wheel")
    wrong = [path for path, text in rendered().items() if not path.is_file() or path.read_text("utf-8") != text]
    for path in wrong:
        if not check:
            path.write_text(rendered()[path], encoding="utf-8")
        print(f"{'differs' if check else 'written'}: {path.relative_to(CHART.parent.parent)}")
    return 1 if wrong and check else 0


if __name__ == "__main__":
    sys.exit(main())
