"""The pool's memory: its layout, and one memory under two mappings."""

import mmap
import os

import pytest
import torch

from engine.kv_storage.paged_cache import PagedKVCache
from tandem.errors import ConfigError
from tandem.values.kv_layout import KVLayout


def layout(dtype="float32"):
    return KVLayout(model_fingerprint="f", dtype=dtype, num_layers=3, num_kv_heads=2, head_dim=8, block_size=4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_paged_cache_blocks_are_contiguous_at_layout_offsets(dtype):
    kv = layout(dtype)
    cache = PagedKVCache(kv, num_blocks=5)
    assert cache.tensor.shape == (3, 5, 2, 2, 4, 8)
    assert not cache.tensor.any()
    cache.layer(2)[3].fill_(1.5)
    view = cache.host_view()
    assert (view.nbytes, view.readonly, view.format) == (cache.size_bytes, False, "B")
    begin = (2 * 5 + 3) * kv.layer_block_bytes
    written = torch.frombuffer(
        view, dtype=cache.tensor.dtype, offset=begin, count=kv.layer_block_bytes // kv_item(dtype)
    )
    assert (written == 1.5).all()
    assert sum(bytes(view)) == sum(bytes(view[begin : begin + kv.layer_block_bytes]))


def kv_item(dtype):
    return 4 if dtype == "float32" else 2


def test_paged_cache_memfd_is_shared_by_both_mappings():
    kv = layout()
    size = 7 * kv.block_bytes
    fd = os.memfd_create("kv")
    os.ftruncate(fd, size)
    ours, theirs = mmap.mmap(fd, size), mmap.mmap(fd, size)
    os.close(fd)
    theirs[0] = 255
    cache = PagedKVCache(kv, num_blocks=7, buffer=memoryview(ours))
    assert theirs[0] == 0, "zeroed at construction"
    cache.layer(1)[6, 1, 0, 2].copy_(torch.arange(8.0))
    begin = (1 * 7 + 6) * kv.layer_block_bytes + ((1 * 2 + 0) * 4 + 2) * 8 * 4
    assert torch.frombuffer(theirs, dtype=torch.float32, offset=begin, count=8).tolist() == list(range(8))
    theirs[begin : begin + 4] = b"\0\0\x80?"
    assert cache.layer(1)[6, 1, 0, 2, 0] == 1.0
    assert cache.host_view().nbytes == size


def test_paged_cache_unfit_buffer_is_refused():
    kv = layout()
    with pytest.raises(ConfigError, match="writable"):
        PagedKVCache(kv, num_blocks=2, buffer=memoryview(bytes(2 * kv.block_bytes)))
    with pytest.raises(ConfigError, match="hold"):
        PagedKVCache(kv, num_blocks=2, buffer=memoryview(bytearray(kv.block_bytes)))
