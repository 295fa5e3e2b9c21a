"""A local cluster of tiny processes is scaled, flipped and replaced while it runs."""

import sys
from functools import partial
from pathlib import Path

import pytest

from cluster.control.gpu_room import workers_without_room
from cluster.control.operations import carry_out
from cluster.control.wire import FlipRequest, RestartRequest, ScaleRequest
from cluster.processes.launcher import LocalLauncher
from cluster.processes.local_cluster import LocalCluster
from cluster.supervisor.exceptions import ChangeFailed, ClusterFailed
from cluster.supervisor.process_view import SilentWatcher
from cluster.supervisor.rollout import ChangeRefused, Rollout, Step
from cluster.supervisor.supervisor import ProcessState, RestartPolicy
from tandem.config.cluster import load
from tests.support.cluster.fake_cluster import fake_command, fake_config
from tests.unit.cluster.processes.test_effective_config import first_of_two_free_ports
from tests.unit.worker.test_gpus import FakeHost

POLICY = RestartPolicy(stop_early_s=0.5, backoff_s=0.01, max_rapid_deaths=2, start_timeout_s=30)


@pytest.fixture
def journal(tmp_path):
    return tmp_path / "journal"


def make(journal, modes=None, **counts):
    return LocalCluster(fake_config(**counts), command=fake_command(journal, modes), policy=POLICY)


def names(cluster):
    assert {view.state for view in cluster.processes} == {ProcessState.READY}
    return sorted(view.name for view in cluster.processes)


def events(journal):
    return [" ".join(line.split()[:2]) for line in journal.read_text().splitlines()]


def seats(cluster):
    """Each worker's GPU, and the number of workers that share it."""
    argv = {view.name: Path(f"/proc/{view.pid}/cmdline").read_text().split("\0") for view in cluster.workers}
    options = ("--gpus", "--gpu-sharers")
    return {name: " of ".join(words[words.index(option) + 1] for option in options) for name, words in argv.items()}


def stated(cluster):
    """Return the addresses of both pools in the routers' file."""
    config = load(cluster.config_path)
    return sorted(config.prefill.addresses), sorted(config.decode.addresses)


async def test_scale_grows_and_shrinks_and_informs_routers(journal):
    notes = []
    async with make(journal) as cluster:
        before = stated(cluster)
        await carry_out(cluster, ScaleRequest(prefill=2, decode=3), notes.append)
        assert names(cluster) == ["decode-0", "decode-1", "decode-2", "prefill-0", "prefill-1", "router"]
        listed = stated(cluster)
        assert [len(pool) for pool in listed] == [2, 3]
        assert sorted(view.address for view in cluster.workers) == sorted(listed[0] + listed[1])
        assert load(cluster.config_path).decode.replicas == 3
        await carry_out(cluster, ScaleRequest(prefill=1, decode=1), notes.append)
        assert names(cluster) == ["decode-0", "prefill-0", "router"]
        assert stated(cluster) == before
        assert notes[-1] == "decode-1 has left"
        await carry_out(cluster, ScaleRequest(), notes.append)
        assert cluster.failure is None
    assert events(journal).count("router started") == 1


async def test_operations_leaving_worker_is_reported_once(journal):
    notes, reports = [], []
    watcher = SilentWatcher()
    watcher.on_note = lambda note: notes.append(f"{note.name} {note.text}")
    command = fake_command(journal, None)
    async with LocalCluster(fake_config(decode=2), command=command, policy=POLICY, watcher=watcher) as cluster:
        await carry_out(cluster, ScaleRequest(decode=1), reports.append)
    assert [*notes, *reports].count("decode-1 has left") == 1


async def test_flip_starts_new_worker_before_old_leaves(journal):
    async with make(journal, prefill=2) as cluster:
        await carry_out(cluster, FlipRequest(to="decode"), [].append)
        assert names(cluster) == ["decode-0", "decode-1", "prefill-0", "router"]
        assert [len(pool) for pool in stated(cluster)] == [1, 2]
        with pytest.raises(ChangeRefused, match="no decode worker can be spared"):
            await carry_out(make(journal), FlipRequest(to="prefill"), [].append)
    seen = events(journal)
    assert seen.index("decode-1 started") < seen.index("prefill-1 term")


async def test_restart_replaces_each_process_after_its_successor_starts(journal):
    async with make(journal, decode=2) as cluster:
        before = {view.pid for view in cluster.processes}
        await carry_out(cluster, RestartRequest(), [].append)
        after = [view.pid for view in cluster.processes]
        assert len(after) == len(before)
        assert before.isdisjoint(after)
        assert [len(pool) for pool in stated(cluster)] == [1, 2]
    seen = events(journal)[:-4]  # the last are those of the stop
    balance = 0
    for event in seen:
        balance += {"started": 1, "term": -1, "hup": 0}[event.split()[1]]
        assert balance <= 5
        assert "term" not in event or balance >= 4


async def test_restart_with_failing_successor_keeps_old_process(journal):
    async with make(journal, {"decode-1": "fail"}) as cluster:
        before = {view.pid for view in cluster.processes}
        listed = stated(cluster)
        with pytest.raises(ChangeFailed, match=r"decode-1 exited with code 3 before it was ready.*directory is empty"):
            await carry_out(cluster, RestartRequest(roles=("decode", "router")), [].append)
        assert {view.pid for view in cluster.processes} == before
        assert stated(cluster) == listed
        await carry_out(cluster, RestartRequest(roles=("prefill",)), [].append)


async def test_restart_in_place_stops_worker_before_its_successor(journal, monkeypatch):
    notes, named = [], []
    async with make(journal, {"decode-0": "later"}, decode=2) as cluster:
        name_workers = cluster.shared.name_workers

        def note(**pools):
            named.extend((view.name, view.state) for view in cluster.processes if view.address in pools["decode"])
            return name_workers(**pools)

        monkeypatch.setattr(cluster.shared, "name_workers", note)
        before = {view.pid for view in cluster.processes}
        await carry_out(cluster, RestartRequest(in_place=True), notes.append)
        assert names(cluster) == ["decode-0", "decode-1", "prefill-0", "router-1"]
        assert before.isdisjoint(view.pid for view in cluster.processes)
        assert [len(pool) for pool in stated(cluster)] == [1, 2]
        assert cluster.failure is None
    assert ("decode-1", ProcessState.STARTING) in named, "routers expect a successor as soon as it is started"
    assert notes[0].startswith("replaced in place, as requested: decode-0, decode-1, prefill-0;")
    seen = [event for event in events(journal) if event.startswith("decode") and not event.endswith("hup")]
    died_once = ["decode-0 term", "decode-0 started", "decode-0 started"]
    assert seen[2:-2] == [*died_once, "decode-1 term", "decode-1 started"]
    assert events(journal).index("router-1 started") < events(journal).index("router term"), "routers always have room"


def no_room(monkeypatch, *, free_bytes):
    """No room on the machine's only GPU."""
    command = (sys.executable, "-c", f"print([{free_bytes}])")
    monkeypatch.setattr(
        "cluster.control.operations.workers_without_room", partial(workers_without_room, command=command)
    )


async def test_restart_with_full_gpu_requires_in_place_for_last_worker(journal, monkeypatch):
    async with make(journal, {"decode-0": "gpu", "decode-1": "gpu"}) as cluster:
        no_room(monkeypatch, free_bytes=124)
        with pytest.raises(ChangeRefused, match=r"no room for a replacement while decode-0 runs, .*--in-place"):
            await carry_out(cluster, RestartRequest(roles=("decode",)), [].append)
        notes = []
        await carry_out(cluster, RestartRequest(roles=("decode",), in_place=True), notes.append)
        assert (
            "decode-0 is the only decode worker: streams and new requests wait until its replacement serves" in notes[1]
        )
        await carry_out(cluster, ScaleRequest(decode=2), [].append)
        notes.clear()
        await carry_out(cluster, RestartRequest(roles=("decode", "prefill")), notes.append)
        assert notes[0].startswith("replaced in place, because the GPUs have no room for both: decode-0, decode-1;")
        assert names(cluster) == ["decode-0", "decode-1", "prefill-1", "router"]
        no_room(monkeypatch, free_bytes=125)
        await carry_out(cluster, RestartRequest(roles=("decode",)), [].append)
        assert "decode-2" in names(cluster)


async def test_restart_successor_gets_same_gpu(journal):
    launcher = LocalLauncher(fake_command(journal), gpus=FakeHost(2))
    async with LocalCluster(fake_config(), launcher=launcher, policy=POLICY) as cluster:
        assert seats(cluster) == {"prefill-0": "0 of 1", "decode-0": "1 of 1"}
        for successor in ("decode-1", "decode-0"):
            await carry_out(cluster, RestartRequest(roles=("decode",)), [].append)
            assert seats(cluster) == {"prefill-0": "0 of 1", successor: "1 of 1"}
        await carry_out(cluster, RestartRequest(roles=("decode",), in_place=True), [].append)
        assert seats(cluster) == {"prefill-0": "0 of 1", "decode-0": "1 of 1"}


async def test_stop_ends_running_change(journal):
    cluster = make(journal, {"decode-1": "slow"})
    notes = []

    def on_progress(text):
        notes.append(text)
        cluster.request_stop()

    async with cluster:
        with pytest.raises(ChangeFailed, match="the cluster is stopping"):
            await carry_out(cluster, ScaleRequest(decode=2), on_progress)


@pytest.mark.parametrize("decode", [1, 2])
async def test_scale_replaces_given_up_worker(journal, decode):
    notes = []
    async with make(journal, {"decode-0": "once"}, decode=2) as cluster:
        await give_up(cluster, "decode-0")
        await carry_out(cluster, ScaleRequest(decode=decode), notes.append)
        assert "decode-0 has left" in notes
        assert "decode-0" not in names(cluster)
        assert len(stated(cluster)[1]) == decode
        await carry_out(cluster, RestartRequest(roles=("router",)), notes.append)
        assert len(names(cluster)) == len(cluster.processes)
        assert cluster.failure is None


async def test_launcher_missing_configuration_file_is_rewritten(journal):
    async with make(journal, decode=2) as cluster:
        cluster.config_path.unlink()
        cluster.config_path.parent.rmdir()
        before = cluster.workers[1]
        cluster.kill(before.name)
        await cluster.wait_ready(before.name, after_pid=before.pid)
        assert [len(pool) for pool in stated(cluster)] == [1, 2]
        assert cluster.config_path.parent.stat().st_mode & 0o077 == 0


async def test_restart_revives_given_up_worker_and_other_scale_keeps_it(journal):
    async with make(journal, {"decode-1": "once"}, decode=2) as cluster:
        await give_up(cluster, "decode-1")
        await carry_out(cluster, ScaleRequest(prefill=2), [].append)
        assert "decode-1" in [view.name for view in cluster.processes]
        await carry_out(cluster, RestartRequest(roles=("decode",)), [].append)
        assert len(names(cluster)) == 5
        assert load(cluster.config_path).decode.replicas == 2


async def test_retire_with_unwritable_folder_still_drains(journal):
    async with make(journal, decode=2) as cluster:
        changes = cluster.change(Rollout([Step(retire="decode-1")]), [].append)
        place = cluster.config_path.parent
        kept = place.rename(journal.parent / "moved")
        place.write_text("in the way")
        await changes
        place.unlink()
        kept.rename(place)
        assert names(cluster) == ["decode-0", "prefill-0", "router"]
    assert "decode-1 term" in events(journal)


async def give_up(cluster, name):
    """Crash it until it is no longer restarted."""
    pid = next(view.pid for view in cluster.processes if view.name == name)
    cluster.kill(name)
    with pytest.raises(ClusterFailed):
        await cluster.wait_ready(name, after_pid=pid)


async def test_pool_does_not_grow_into_the_health_ports_of_the_other(journal):
    port, config = first_of_two_free_ports(), fake_config()
    ports = {"prefill": port, "decode": port + 1}
    pools = {name: getattr(config, name).model_copy(update={"health_port": at}) for name, at in ports.items()}
    async with LocalCluster(config.model_copy(update=pools), command=fake_command(journal), policy=POLICY) as cluster:
        before = cluster.config
        with pytest.raises(ChangeRefused, match=f"decode.health_port: port {port + 1} of localhost is one of prefill"):
            await carry_out(cluster, ScaleRequest(prefill=2), [].append)
        assert cluster.config == before
        await carry_out(cluster, ScaleRequest(decode=2), [].append)
        assert names(cluster) == ["decode-0", "decode-1", "prefill-0", "router"]


async def test_multi_node_workers_restart_in_place_and_never_flip(journal):
    config = fake_config(decode=2)
    spread = {"tensor_parallel_size": 2, "nodes": 2, "rank_port": first_of_two_free_ports()}
    config = config.model_copy(update={"decode": config.decode.model_copy(update=spread)})
    async with LocalCluster(config, command=fake_command(journal), policy=POLICY) as cluster:
        notes = []
        await carry_out(cluster, RestartRequest(roles=("decode", "prefill")), notes.append)
        assert notes[0].startswith("replaced in place, because ranks on other nodes follow one worker at a time")
        assert "decode-0, decode-1;" in notes[0]
        # Each at the index that the nodes' ranks know; the other pool as ever.
        assert names(cluster) == ["decode-0", "decode-1", "prefill-1", "router"]
        with pytest.raises(ChangeRefused, match="workers with ranks on other nodes cannot change pools"):
            await carry_out(cluster, FlipRequest(to="prefill"), [].append)
        await carry_out(cluster, ScaleRequest(decode=1), [].append)
        with pytest.raises(ChangeRefused, match="no room for a replacement while decode-0 runs"):
            await carry_out(cluster, RestartRequest(roles=("decode",)), [].append)
