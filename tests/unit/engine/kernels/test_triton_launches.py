"""Launch tables, and ahead-of-time compilation of what they launch, for sm_90, with no GPU."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.unit.engine.kernels.triton_interpreter import SETTING  # isort: skip
from engine.kernels.triton.tune import candidates_of, decode_candidates, fastest, prefill_candidates, tuned_table
from engine.kernels.triton.tuning import (
    FIXED_KEYS,
    TABLES,
    AttentionShape,
    DecodeLaunch,
    LaunchTable,
    PrefillLaunch,
    load_table,
)
from tandem.errors import ConfigError

ROOT = Path(__file__).parents[4]
SHAPES = [
    AttentionShape(head_dim=head_dim, eight_bit=eight_bit, wide=wide)
    for head_dim in (16, 32, 64, 80, 128, 256)
    for eight_bit in (False, True)
    for wide in (False, True)
]


def compile_kernels(tmp_path, *arguments):
    """In a new process: this one uses the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != SETTING}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "engine.kernels.triton.aot", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout, done.stderr[-2000:])
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.turn(0)
def test_representative_kernels_compile_for_hopper(tmp_path):
    status, rows = compile_kernels(tmp_path, "--representative")
    assert status == 0
    kernels = {row["name"].split()[0] for row in rows}
    assert kernels >= {
        "paged_prefill",
        "flash_decode",
        "merge_parts",
        "gemm_few",
        "group_gemm",
        "byte_gemm",
        "round_rows",
        "rope_kv",
        "add_rms_norm",
        "silu_mul",
        "sampling",
    }
    assert all(row["registers"] > 8 for row in rows)
    assert all(row["spill_bytes"] <= (288 if row["timed"] else 64) for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100", "some other GPU"])
def test_triton_kernels_compile_for_hopper(tmp_path, gpu):
    status, rows = compile_kernels(tmp_path, "--gpu", gpu)
    assert status == 0
    assert len(rows) > 250


def test_triton_compile_reports_excessive_launch(tmp_path):
    raw = json.loads((TABLES / "h200.json").read_text())
    raw["prefill"] = [entry | {"block_m": 256, "num_warps": 4} for entry in raw["prefill"]]
    tables = tmp_path / "tables"
    tables.mkdir()
    (tables / "greedy.json").write_text(json.dumps(raw))
    case = ("--only", "paged_prefill bf16-same-d64-g4")
    status, rows = compile_kernels(tmp_path / "cache", *case, "--tables", str(tables))
    assert status == 1
    assert rows[0]["spill_bytes"] > 64


@pytest.mark.parametrize("path", sorted(TABLES.glob("*.json")), ids=lambda path: path.stem)
def test_triton_tables_have_entry_for_every_shape(path):
    table = LaunchTable(json.loads(path.read_text()))
    for shape in SHAPES:
        for deterministic in (False, True):
            prefill = table.prefill(shape, deterministic=deterministic)
            decodes = table.decode(shape, deterministic=deterministic)
            programs = [launch.programs_per_sm for launch in decodes]
            assert programs == sorted(programs)
            if deterministic:
                [decode] = decodes
                assert prefill.fixed_keys == decode.fixed_keys == FIXED_KEYS
                assert (prefill.block_m, prefill.block_n) == (decode.block_m, decode.block_n)
                assert FIXED_KEYS % prefill.block_n == 0
            for launch in (prefill, *decodes):
                assert launch.fixed_keys == (FIXED_KEYS if deterministic else 0)
                assert launch.block_n % 16 == 0
                assert launch.num_warps in (2, 4, 8)
    for wide in (False, True):
        assert table.gemm(wide=wide).block_m >= 16
    for arithmetic in ("groups", "bytes"):
        rows = [launch.rows for launch in table.quantized(arithmetic)]
        assert rows == [16, 128, 0], "ever more, the last for any number"
        [fixed] = table.quantized(arithmetic, deterministic=True)
        assert (fixed.rows, fixed.programs_per_sm) == (0, 0), "one order of summation for any number of rows"


def test_launch_table_is_chosen_by_longest_gpu_name(tmp_path):
    for name, gpu in (("a", "default"), ("b", "NVIDIA H100"), ("c", "NVIDIA H100 NVL")):
        (tmp_path / f"{name}.json").write_text(json.dumps({"gpu": gpu}))
    assert load_table("NVIDIA H100 80GB HBM3", tmp_path).gpu == "NVIDIA H100"
    assert load_table("NVIDIA H100 NVL", tmp_path).gpu == "NVIDIA H100 NVL"
    assert load_table("NVIDIA A10", tmp_path).gpu == "default"
    assert load_table("NVIDIA H200").gpu == "NVIDIA H200"


def test_launch_table_missing_or_malformed_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no launch table"):
        load_table("x", tmp_path)
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        load_table("x", tmp_path)
    (tmp_path / "broken.json").write_text('{"gpu": "default", "prefill": [{"head_dim": 64}], "decode": []}')
    table = load_table("x", tmp_path)
    with pytest.raises(ConfigError, match="entry"):
        table.prefill(AttentionShape(head_dim=64))
    with pytest.raises(ConfigError, match="no prefill entry"):
        table.prefill(AttentionShape(head_dim=65))
    with pytest.raises(ConfigError, match="no list 'gemm'"):
        table.gemm(wide=False)
    (tmp_path / "broken.json").write_text('{"gpu": "default", "quantized": [{"arithmetic": "groups", "rows": 16}]}')
    with pytest.raises(ConfigError, match="entry"):
        load_table("x", tmp_path).quantized("groups")
    with pytest.raises(ConfigError, match="no quantized entry for bytes of any rows"):
        load_table("x", tmp_path).quantized("bytes")


@dataclass(frozen=True)
class FakeBench:
    """Reports small tiles of many stages as fast."""

    def prefill_ms(self, launch):
        return launch.block_m + launch.block_n - launch.num_stages / 10 + launch.num_warps / 100

    def decode_ms(self, launch, batch):
        return launch.block_n - launch.num_stages / 10 + launch.num_warps / 100 + launch.min_keys / 1000


def test_tuned_table_serves_every_shape():
    shipped = load_table("NVIDIA H200")
    made = tuned_table(shipped, "NVIDIA Fictional", lambda shape: FakeBench())
    table = LaunchTable(json.loads(json.dumps(made)))
    assert table.prefill(SHAPES[0]) == PrefillLaunch(block_m=64, block_n=32, num_warps=4, num_stages=4, timed=True)
    assert table.few_rows(6144, 4096) == shipped.few_rows(6144, 4096)
    assert table.quantized("groups") == shipped.quantized("groups")
    assert table.decode(SHAPES[0]) == (DecodeLaunch(block_n=32, num_warps=2, num_stages=5, min_keys=128),)
    shape = AttentionShape(head_dim=128)
    assert [launch.programs_per_sm for launch in table.decode(shape)] == [1, 2, 2], "as many as the shipped table has"
    for shape in SHAPES:
        assert table.prefill(shape, deterministic=True) == shipped.prefill(shape, deterministic=True)


def test_tuning_skips_unlaunchable_candidates():
    from triton.runtime.errors import OutOfResources

    start = PrefillLaunch(block_m=128, block_n=64, num_warps=8, num_stages=3)

    def time_ms(launch):
        if launch != start:
            raise OutOfResources(2, 1, "shared memory")
        return 1.0

    shape = AttentionShape(head_dim=128)
    assert fastest(prefill_candidates(start, shape), time_ms) == (start, 1.0)
    with pytest.raises(ValueError, match="no candidate"):
        fastest((replace(c, block_m=64) for c in prefill_candidates(start, shape)), time_ms)


def test_tuning_leaves_out_what_cannot_fit():
    start, own = (
        DecodeLaunch(block_n=64, num_warps=4, num_stages=3),
        PrefillLaunch(block_m=128, block_n=64, num_warps=8, num_stages=3),
    )
    usual, large = AttentionShape(head_dim=128), AttentionShape(head_dim=256, wide=True)
    assert len(list(decode_candidates(start, usual))) == 36, "all: tiles of 64 KiB, five of them under way at most"
    assert max(c.block_n * c.num_stages for c in decode_candidates(start, large)) < 128 * 4
    assert all(c.block_m * 384 <= 255 * 32 * c.num_warps for c in prefill_candidates(own, AttentionShape(head_dim=256)))
    assert {c.block_m for c in prefill_candidates(own, usual) if c.num_warps == 4} == {64, 128}
    for gpu in ("NVIDIA H200", "NVIDIA H100", "other"):
        found = candidates_of(load_table(gpu))
        assert len(set(found)) == len(found) < 700
