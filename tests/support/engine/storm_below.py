"""What a storm's engine has below its pool: places in host memory, and files that another storm may have left."""

import threading
from dataclasses import dataclass
from pathlib import Path

from engine.kv_cache.tiers.cache import TierSpec
from engine.kv_cache.tiers.disk import DiskSpec
from engine.kv_storage.block_file import cache_identity
from engine.kv_storage.disk_store import DiskStore
from engine.runner.model_runner import ModelRunner
from tandem.values.kv_layout import KVLayout
from tests.support.engine import ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Below:
    """What there is below the pool."""

    num_places: int = 0
    num_files: int = 0
    folder: Path | None = None

    def open(self, layout: KVLayout, runner: ModelRunner, landed: threading.Event) -> DiskStore | None:
        if self.folder is None:
            return None
        identity = cache_identity(layout, secret=ledger.SECRET, computed_by=())
        store = DiskStore(self.folder, identity=identity, place=runner.blocks.place)
        store.listen(landed.set)
        return store

    def spec(self, slots: range, runner: ModelRunner, disk: DiskStore | None) -> TierSpec | None:
        if not slots:
            return None
        found = None if disk is None else disk.find(self.num_files)
        return TierSpec(
            slots=slots,
            block_bytes=1,
            copier=runner.blocks,
            disk=None if disk is None else DiskSpec(port=disk, capacity=self.num_files, names=found.names),
        )


NOTHING = Below()
