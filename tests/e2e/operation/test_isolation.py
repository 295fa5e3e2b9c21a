"""Whether TTFT reveals to a tenant what another has sent, through a router with both their keys."""

import io
from random import Random

import pytest
from rich.console import Console

from tandem_bench.__main__ import parser
from tandem_bench.isolation.measure import Prober, measure
from tests.support.running_cluster import running

KEYS = {"victim": "key-of-the-victim", "attacker": "key-of-the-attacker"}


@pytest.mark.turn(2)
async def test_prefix_guess_succeeds_only_within_own_tenant(fork_servers) -> None:
    """So few probes prove nothing by time; what answers report is exact."""
    entries = [{"key": key, "tenant": tenant} for tenant, key in KEYS.items()]
    access = {"router__api_keys": entries, "router__operator_access": {"metrics": "open"}}
    async with (
        running(command=fork_servers.command, prefill__replicas=0, decode__replicas=2, **access) as cluster,
        Prober(cluster.local.http_url, Random(1)) as prober,
    ):
        await prober.probe(4, victim=KEYS["victim"], attacker=KEYS["victim"])
        control = await prober.probe(16, victim=KEYS["victim"], attacker=KEYS["victim"])
        assert all((probe.cached_tokens > 0) is probe.was_sent for probe in control)
        foreign = await prober.probe(10, victim=KEYS["victim"], attacker=KEYS["attacker"])
        assert not any(probe.cached_tokens for probe in foreign)


@pytest.mark.slow
async def test_prefix_guesses_of_other_tenant_are_at_chance() -> None:
    rows, out = [], Console(file=io.StringIO(), width=120)
    await measure(parser().parse_args(["isolation"]), rows, out=out, err=out)
    print(out.file.getvalue())
    found = {row.name: row for row in rows}
    assert found["another tenant: probes"].value >= 2000
    assert found["the same tenant: AUC"].met, "else this test could not fail"
    assert [f"{row.name}: {row.value:.3g}, {row.goal}" for row in rows if row.met is False] == []
    assert found["another tenant: AUC off 0.5"].met
