"""Whether keys and values may move between two workers, and why not; checked at HELLO and by the router. Pure.

Workers may differ in tensor-parallel size, in block size and in the dtype of their caches, but not in the model.
"""

from tandem.values.kv_layout import DTYPE_BITS, QUANTISED_DTYPES, KVLayout

CONVERSIONS = frozenset(
    pair
    for plain in DTYPE_BITS
    for codes in QUANTISED_DTYPES
    if plain not in QUANTISED_DTYPES
    for pair in ((plain, codes), (codes, plain))
)
"""(from, to): dtypes that can be converted, as `engine/kv_storage/kv_codes.py` does it. Codes are never converted to
other codes: that would lose accuracy twice."""


def cannot_travel_as(source: str, wire: str, destination: str) -> str | None:
    """Reason why KV of dtype `source` cannot be sent as `wire` and cached as `destination`; None when it can."""
    for step in ((source, wire), (wire, destination)):
        if step[0] != step[1] and step not in CONVERSIONS:
            return f"wire_dtype: no conversion from {step[0]} to {step[1]}"
    return None


def agree(source: KVLayout, destination: KVLayout) -> str | None:
    """Reason why cells cannot move from `source` to `destination`, beginning with the field's name, or None."""
    return (
        _unequal("model_fingerprint", source.model_fingerprint, destination.model_fingerprint)
        or _unequal("num_layers", source.num_layers, destination.num_layers)
        or _unequal("num_kv_heads", source.num_kv_heads, destination.num_kv_heads)
        or _unequal("head_dim", source.head_dim, destination.head_dim)
        or _bad_dtypes(source.dtype, destination.dtype)
        or _bad_block_sizes(source.block_size, destination.block_size)
        or _bad_windows(source, destination)
        or _bad_split("source", source)
        or _bad_split("destination", destination)
        or _bad_regions("source", source)
        or _bad_regions("destination", destination)
    )


def _unequal(field: str, source: object, destination: object) -> str | None:
    return None if source == destination else f"{field}: {source} at the source, {destination} at the destination"


def _bad_dtypes(source: str, destination: str) -> str | None:
    if (source == destination and source in DTYPE_BITS) or (source, destination) in CONVERSIONS:
        return None
    return f"dtype: no conversion from {source} to {destination}"


def _bad_block_sizes(source: int, destination: int) -> str | None:
    small, large = sorted((source, destination))
    if small > 0 and large % small == 0:
        return None
    return f"block_size: {source} at the source, {destination} at the destination, neither divides the other"


def _bad_windows(source: KVLayout, destination: KVLayout) -> str | None:
    """Where windowed layers are kept apart, both sides must give up the same part of a prompt."""
    return (
        _unequal("windowed_layers", source.windowed_layers, destination.windowed_layers)
        or _unequal("window", source.window, destination.window)
        or (_unequal("block_size", source.block_size, destination.block_size) if source.windowed_layers else None)
    )


def _bad_split(where: str, layout: KVLayout) -> str | None:
    heads, ranks = layout.num_kv_heads, layout.tp_size
    if min(heads, ranks) > 0 and (heads % ranks == 0 or ranks % heads == 0):
        return None
    return f"tp_size: {ranks} at the {where} neither divides nor is a multiple of {heads} heads"


def _bad_regions(where: str, layout: KVLayout) -> str | None:
    if layout.num_regions > 0 and layout.tp_size % layout.num_regions == 0:
        return None
    return f"num_regions: {layout.num_regions} at the {where} does not divide {layout.tp_size} ranks"
