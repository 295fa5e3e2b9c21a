"""Each worker's node, resources and configuration on Ray."""

import random

import pytest
from pydantic import SecretStr, ValidationError

from cluster.supervisor.ray_placement import SHUN_S, Node, RayPlacement, bundle_of, render_resources, worker_config
from cluster.supervisor.supervisor import Role
from tandem.config.cluster import ClusterConfig, load
from tandem.config.worker import num_ranks


def node(name, cpus=8.0, gpus=0.0, free=None, **more):
    total = {"CPU": cpus, "memory": 64.0 * (1 << 30), **({"GPU": gpus} if gpus else {}), **more}
    return Node(node_id=name, host=f"10.0.0.{ord(name[0])}", total=total, free=total if free is None else free)


def config(**overrides):
    return load(None, {name.replace("__", "."): value for name, value in overrides.items()})


def test_ray_bundle_counts_a_gpu_per_rank_and_requested_resources():
    made = config(decode__tensor_parallel_size=4, ray__decode__resources={"h100": 1.0})
    assert bundle_of(made, Role.DECODE, has_gpus=True) == {"CPU": 4.0, "GPU": 4.0, "h100": 1.0}
    assert bundle_of(made, Role.PREFILL, has_gpus=True) == {"CPU": 1.0, "GPU": 1.0}
    assert bundle_of(made, Role.PREFILL, has_gpus=False) == {"CPU": 1.0}
    on_cpus = config(engine__device="cpu", engine__num_threads=3, decode__tensor_parallel_size=2)
    assert bundle_of(on_cpus, Role.DECODE, has_gpus=True) == {"CPU": 6.0}
    forced = config(engine__device="cuda", ray__prefill__cpus=0.5)
    assert bundle_of(forced, Role.PREFILL, has_gpus=False) == {"CPU": 0.5, "GPU": 1.0}


@pytest.mark.parametrize("name", ["CPU", "GPU", "", "a b"])
def test_ray_reserved_names_are_refused_as_custom_resources(name):
    with pytest.raises(ValidationError, match="ray"):
        ClusterConfig.model_validate({"ray": {"decode": {"resources": {name: 1.0}}}})


def test_ray_placement_spreads_pools():
    placement, nodes = RayPlacement(), [node("a"), node("b"), node("c")]
    where = {
        (role, index): placement.choose(f"{role.value}-{index}", role, {"CPU": 1.0}, nodes, 0.0).node_id
        for index in range(3)
        for role in (Role.PREFILL, Role.DECODE)
    }
    for role in (Role.PREFILL, Role.DECODE):
        assert {where[role, index] for index in range(3)} == {"a", "b", "c"}
    assert len({where[role, 0] for role in (Role.PREFILL, Role.DECODE)}) == 2


def test_ray_placement_counts_recently_taken_resources():
    placement, nodes = RayPlacement(), [node("a", gpus=4.0), node("b", gpus=4.0)]
    bundle = {"CPU": 1.0, "GPU": 4.0}
    assert {placement.choose(f"decode-{i}", Role.DECODE, bundle, nodes, 0.0).node_id for i in range(2)} == {"a", "b"}
    assert placement.choose("decode-2", Role.DECODE, bundle, nodes, 0.0) is None
    placement.leave("decode-0")
    assert placement.choose("decode-2", Role.DECODE, bundle, nodes, 0.0) is not None


def test_ray_placement_ignores_resources_used_by_others():
    placement = RayPlacement()
    busy, idle = node("a", cpus=16.0, free={"CPU": 0.5}), node("b", cpus=2.0)
    assert placement.choose("decode-0", Role.DECODE, {"CPU": 1.0}, [busy, idle], 0.0) is idle


def test_ray_placement_shuns_node_of_lost_worker():
    placement, nodes, bundle = RayPlacement(), [node("a"), node("b")], {"CPU": 1.0}
    first = placement.choose("decode-0", Role.DECODE, bundle, nodes, 0.0)
    other = next(one for one in nodes if one is not first)
    placement.choose("decode-1", Role.DECODE, bundle, nodes, 0.0)
    placement.lost("decode-0", 1.0)
    assert placement.choose("decode-0", Role.DECODE, bundle, nodes, 2.0) is other
    assert placement.choose("decode-2", Role.DECODE, bundle, [first], 2.0) is first, "rather there than nowhere"
    placement.leave("decode-2")
    placement.leave("decode-0")
    assert placement.choose("decode-0", Role.DECODE, bundle, nodes, 1.5 + SHUN_S) is first


def test_ray_placement_never_overcommits_nodes():
    draw = random.Random(7)
    for _ in range(200):
        nodes = [node(name, cpus=float(draw.randrange(1, 9)), gpus=float(draw.randrange(5))) for name in "abcd"]
        placement, homes = RayPlacement(), {}
        for step in range(40):
            name = f"decode-{draw.randrange(12)}"
            if draw.random() < 0.3:
                placement.leave(name)
                homes.pop(name, None)
                continue
            bundle = {"CPU": float(draw.randrange(1, 4)), "GPU": float(draw.randrange(3))}
            homes.pop(name, None)
            chosen = placement.choose(name, Role.DECODE, bundle, nodes, float(step))
            if chosen is not None:
                homes[name] = (chosen.node_id, bundle)
            for one in nodes:
                for resource in ("CPU", "GPU"):
                    taken = sum(taken.get(resource, 0.0) for where, taken in homes.values() if where == one.node_id)
                    assert taken <= one.total.get(resource, 0.0)


def test_ray_worker_config_has_node_share_and_no_foreign_secrets():
    cluster = config(
        router__api_keys=["sk-of-a-client-0123456789"],
        secret="s" * 32,
        ray__decode__cpus=4.0,
        decode__tensor_parallel_size=2,
        router__takeover_s=3.0,
    )
    read = worker_config(cluster, Role.DECODE, node("a", cpus=16.0), "org/model")
    assert (read.engine.num_threads, read.engine.memory_bytes) == (2, None)
    assert num_ranks(read, read.decode) == 8, "four workers of two ranks could be there"
    assert (read.model.path, read.router.takeover_s, read.router.api_keys) == ("org/model", 3.0, ())
    assert read.secret == SecretStr("s" * 32)
    stated = config(engine__num_threads=3, engine__memory_bytes=1 << 30)
    read = worker_config(stated, Role.DECODE, node("a"), "builtin")
    assert (read.engine.num_threads, read.engine.memory_bytes) == (3, 1 << 30)
    own = config(ray__prefill__resources={"memory": float(5 << 30)})
    assert worker_config(own, Role.PREFILL, node("a"), "builtin").engine.memory_bytes == 5 << 30


def test_ray_worker_config_on_gpu_leaves_memory_to_worker():
    read = worker_config(config(), Role.DECODE, node("a", gpus=8.0), "builtin")
    assert (read.engine.num_threads, read.engine.memory_bytes) == (None, None)


def test_ray_resources_are_rendered_readably():
    assert render_resources({"GPU": 2.0, "CPU": 0.5, "memory": float(3 << 30)}) == "0.5 CPU, 2 GPU, 3.0 GiB memory"
