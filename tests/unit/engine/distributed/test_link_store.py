"""Ranks of different nodes connect over links: gloo between two loopback addresses, without a shared file or port."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from engine.distributed.link_store import LinkStore
from engine.distributed.links.lost import RankLost
from engine.distributed.links.rendezvous import RendezvousStore
from engine.distributed.torch_group import OverNodes, TorchGroup, interface_of

CPU = torch.device("cpu")
TIMEOUT_S = 30.0


def meet(keys: RendezvousStore, rank: int, host: str, timeout_s: float = TIMEOUT_S) -> TorchGroup:
    over_nodes = OverNodes(keys=keys, host=host)
    return TorchGroup(None, rank=rank, size=2, device=CPU, timeout_s=timeout_s, over_nodes=over_nodes)


def test_link_store_ranks_of_two_nodes_meet_and_sum() -> None:
    keys = RendezvousStore()

    def run(rank: int) -> list[float]:
        group = meet(keys, rank, f"127.0.0.{rank + 1}")
        try:
            large = torch.full((50_000,), float(rank + 1))
            gathered = group.gather(torch.tensor([float(rank)]))
            return [group.all_reduce_(large)[-1].item(), *(part.item() for part in gathered)]
        finally:
            group.close()
            group.close()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, range(2))) == [[3.0, 0.0, 1.0], [3.0]]


def test_link_store_missing_peer_raises_at_deadline() -> None:
    with pytest.raises(RankLost, match="rank 0 did not join the group"):
        meet(RendezvousStore(), 0, "127.0.0.1", timeout_s=0.1)


def test_link_store_timeout_names_missing_key() -> None:
    store = LinkStore(RendezvousStore(), timeout_s=0.01)
    store.set("there", "text")
    store.wait(["there"], timedelta(seconds=1))
    assert (store.get("there"), store.check(["there"]), store.check(["there", "else"])) == (b"text", True, False)
    assert (store.add("count", 2), store.add("count", 3)) == (2, 5)
    with pytest.raises(RuntimeError, match="no other rank has set else"):
        store.get("else")


def test_link_store_implements_operations_of_nccl() -> None:
    store = LinkStore(RendezvousStore(), timeout_s=0.01)
    store.set("one", b"1")
    store.set("two", b"2")
    # As torch's own code calls them, and through its prefix, too.
    clone = dist.PrefixStore("group", store).clone()
    clone.set("three", b"3")
    assert dist.Store.num_keys(store) == 3
    assert (dist.Store.delete_key(store, "one"), dist.Store.delete_key(store, "one")) == (True, False)
    assert (clone.delete_key("three"), store.check(["two"]), dist.Store.num_keys(store)) == (True, True, 1)


def test_interface_of_address_is_found_or_refused() -> None:
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(RankLost, match=r"no network interface here has the address 203\.0\.113\.7"):
        interface_of("203.0.113.7")
