"""Reads `adapter_config.json` of PEFT: what a LoRA adapter scales its matrices by, and whether it does anything else.

LoRA (Hu et al., 2021) adds `scale * B @ A` to a matrix; rank-stabilised LoRA (Kalajdzievski, 2023) has another scale.
Whatever would change the model beyond that is refused by name: an adapter that is applied in part answers wrongly
without a sign of it.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.errors import ConfigError
from tandem.model_files import parse_json_object

ADAPTER_CONFIG = "adapter_config.json"
_MAX_RANK = 65_536
_NEUTRAL: tuple[object, ...] = (None, False, [], {}, "")
_HARMLESS = frozenset(
    {
        # Which matrices training added to: the stored tensors say it.
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "target_parameters"),
        # About training, files and their origin only.
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "peft_version"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "task_type", "peft_type", "bias"),
        *("megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config"),
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"),
    }
)
"""Names whose values change nothing here, or are read below. Any other must have a value that switches it off."""
_OWN_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that subtract from the model's own matrices: the adapter belongs to those, not to the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """The scale of every matrix of an adapter, and what is said of their ranks."""

    ranks: Mapping[str, int]
    """By field, e.g. `rank_pattern.q_proj`; the matrices are read as they are."""
    alpha: float
    is_rank_stabilised: bool
    alpha_pattern: Mapping[str, float]
    """Other alphas by the end of a module's name, as PEFT matches it."""

    def scale(self, module: str, rank: int) -> float:
        """Factor on `B @ A` of a module, e.g. `model.layers.0.self_attn.q_proj`, whose matrices have this rank."""
        alpha = self.alpha
        for pattern, value in self.alpha_pattern.items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                alpha = value
                break
        return alpha / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def parse_lora_config(text: bytes) -> LoraConfig:
    """Read what `adapter_config.json` holds. Raises ConfigError, naming file and field."""
    raw = parse_json_object(text, ADAPTER_CONFIG)
    if raw.get("peft_type") != "LORA":
        raise _error("peft_type", f"must be LORA, is {raw.get('peft_type')!r:.40}")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise _error("task_type", f"must be CAUSAL_LM, is {raw['task_type']!r:.40}")
    if raw.get("bias", "none") != "none":
        raise _error("bias", f"must be none, is {raw['bias']!r:.40}")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_OWN_BASE):
        raise _error(
            "init_lora_weights", f"{start!r:.40} changes the model's own matrices: convert the adapter to LoRA"
        )
    for name, value in raw.items():
        if name not in _HARMLESS and value not in _NEUTRAL:
            raise _error(name, f"{value!r:.60} is not supported")
    return LoraConfig(
        ranks=_ranks(raw),
        alpha=_number("lora_alpha", raw.get("lora_alpha")),
        is_rank_stabilised=_switch("use_rslora", raw.get("use_rslora", False)),
        alpha_pattern=_alphas(raw.get("alpha_pattern") or {}),
    )


def _ranks(raw: Mapping[str, Any]) -> dict[str, int]:
    patterns = raw.get("rank_pattern") or {}
    if not isinstance(patterns, dict):
        raise _error("rank_pattern", "must be an object")
    given: dict[str, Any] = {"r": raw.get("r")}
    given |= {f"rank_pattern.{module:.80}": rank for module, rank in patterns.items()}
    ranks: dict[str, int] = {}
    for field, rank in given.items():
        if type(rank) is not int or not 0 < rank <= _MAX_RANK:
            raise _error(field, f"must be an integer of 1 to {_MAX_RANK}, is {rank!r:.40}")
        ranks[field] = rank
    return ranks


def _alphas(given: Any) -> dict[str, float]:
    if not isinstance(given, dict):
        raise _error("alpha_pattern", "must be an object")
    found = {}
    for pattern, value in given.items():
        # Names, dots and digits: a pattern of the full language could take forever to match.
        if not re.fullmatch(r"\^?[\w.]{1,256}\$?", pattern):
            raise _error("alpha_pattern", f"{pattern!r:.80} must be the end of a module's name")
        found[re.escape(pattern.removeprefix("^").removesuffix("$"))] = _number("alpha_pattern", value)
    return found


def _number(name: str, value: Any, most: float = 1e6) -> float:
    if type(value) not in (int, float) or not 0 < value <= most:
        raise _error(name, f"must be a number above 0 and at most {most:g}, is {value!r:.40}")
    return float(value)


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _error(name, f"must be true or false, is {value!r:.40}")
    return value


def _error(name: str, problem: str) -> ConfigError:
    return ConfigError(f"{ADAPTER_CONFIG}: {name} {problem}")
