"""Headers of GGUF files: what the `gguf` package wrote is read as it was; what is damaged is refused by name."""

import mmap
import os
import random
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.errors import ConfigError
from tandem.gguf.container import GgufArray, GgufHeader, open_header

KINDS = {
    "uint8": st.integers(0, 2**8 - 1),
    "int8": st.integers(-(2**7), 2**7 - 1),
    "uint16": st.integers(0, 2**16 - 1),
    "int16": st.integers(-(2**15), 2**15 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "string": st.text(max_size=20).filter(bool),
}
VALUES = st.sampled_from(sorted(KINDS)).flatmap(lambda kind: st.tuples(st.just(kind), KINDS[kind]))
ARRAYS = st.one_of(
    st.lists(st.text(max_size=9), min_size=1, max_size=9),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9),
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=9),
    st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=3), min_size=1, max_size=3),
)
KEYS = st.text("abc._", min_size=1, max_size=12)


def write(file: Path, metadata: dict[str, tuple[str, Any]], arrays: dict[str, list[Any]]) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    for key, (kind, value) in metadata.items():
        getattr(writer, f"add_{kind}")(key, value)
    for key, values in arrays.items():
        writer.add_array(key, values)
    writer.add_tensor("factors", np.array([1.0, 8.0, 0.1], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@settings(max_examples=150, deadline=None)
@given(metadata=st.dictionaries(KEYS, VALUES, max_size=6), arrays=st.dictionaries(KEYS, ARRAYS, max_size=4))
def test_gguf_metadata_is_read_as_it_was_written(
    metadata: dict[str, tuple[str, Any]], arrays: dict[str, list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    arrays = {f"array.{key}": values for key, values in arrays.items()}
    file = tmp_path_factory.mktemp("written") / "x.gguf"
    write(file, metadata, arrays)
    with open_header(file) as header:
        assert header.metadata.keys() == {"general.architecture", *metadata, *arrays}
        for key, (_, value) in metadata.items():
            assert (type(header.metadata[key]), header.metadata[key]) == (type(value), value)
        for key, values in arrays.items():
            if isinstance(values[0], list):
                assert isinstance(header.metadata[key], GgufArray)
            else:
                assert list(header.texts(key) if isinstance(values[0], str) else header.numbers(key)) == values
        assert header.floats(header.tensors["factors"]) == (1.0, 8.0, 0.1)


@settings(max_examples=200, deadline=None)
@given(
    exact=st.floats(width=32),
    decimal=st.builds(lambda digits, power: float(f"{digits}e{power}"), st.integers(1, 999_999), st.integers(-30, 30)),
)
def test_gguf_float32_is_read_as_the_decimal_that_was_meant(
    exact: float, decimal: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("floats") / "x.gguf"
    write(file, {"exact": ("float32", exact), "decimal": ("float32", decimal)}, {})
    with open_header(file) as header:
        assert np.float32(header.metadata["exact"]).tobytes() == np.float32(exact).tobytes()
        assert header.metadata["decimal"] == decimal


def test_gguf_values_of_other_types_are_refused_by_key(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    scalars = {"n": ("uint32", 7), "big": ("uint64", 2**40), "t": ("string", "text"), "b": ("bool", True)}
    write(file, {**scalars, "inf": ("float64", float("inf"))}, {"texts": ["a"], "numbers": [1]})
    with open_header(file) as header:
        cases = [
            (lambda: header.integer("absent"), "x.gguf: absent is missing"),
            (lambda: header.integer("b"), "x.gguf: b must be an integer in [0, 2147483647], is True"),
            (lambda: header.integer("big"), "x.gguf: big must be an integer in [0, 2147483647], is 1099511627776"),
            (lambda: header.integer("texts"), "x.gguf: texts must be an integer in [0, 2147483647], is an array"),
            (lambda: header.number("t"), "x.gguf: t must be a finite number, is 'text'"),
            (lambda: header.number("inf"), "x.gguf: inf must be a finite number, is inf"),
            (lambda: header.boolean("n", False), "x.gguf: n must be true or false, is 7"),
            (lambda: header.text("n"), "x.gguf: n must be a text, is 7"),
            (lambda: header.texts("numbers"), "x.gguf: numbers must be an array of texts"),
            (lambda: header.texts("n"), "x.gguf: n must be an array, is 7"),
            (lambda: header.numbers("texts"), "x.gguf: texts must be an array of numbers"),
        ]
        for read, message in cases:
            with pytest.raises(ConfigError) as refused:
                read()
            assert str(refused.value) == message
        assert (header.integer("n"), header.number("n"), header.boolean("b", False)) == (7, 7, True)
        assert (header.integer("absent", 3), header.text("absent", "x")) == (3, "x")


def test_gguf_huge_arrays_are_refused_before_they_are_decoded(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    write(file, {}, {"many": [0] * 10, "long": ["x" * 70_000]})
    raw = bytearray(file.read_bytes())
    at = raw.index(b"many") + 4 + 4 + 4
    raw[at : at + 8] = struct.pack("<Q", 2**23)
    raw[at + 8 : at + 8] = bytes((2**23 - 10) * 4)  # the array is as long as it says
    file.write_bytes(raw)
    with open_header(file) as header:
        with pytest.raises(ConfigError, match="many has 8388608 elements; at most 4194304 are supported"):
            header.numbers("many")
        with pytest.raises(ConfigError, match="long has a string of 70000 bytes; at most 65536 are supported"):
            header.texts("long")


def test_gguf_same_key_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x.gguf", {"some.key": ("uint32", 1), "same.key": ("uint32", 2)}, {})
    raw = (tmp_path / "x.gguf").read_bytes().replace(b"same.key", b"some.key")
    (tmp_path / "x.gguf").write_bytes(raw)
    with pytest.raises(ConfigError, match=r"'some\.key' appears twice"), open_header(tmp_path / "x.gguf"):
        pass


def test_gguf_arrays_are_never_read_past_the_end(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    write(file, {"n": ("uint32", 1)}, {"texts": ["one", "two", "three"], "nested": [[1, 2], [3]]})
    whole = file.read_bytes()
    draw = random.Random(1)
    for _ in range(2000):
        raw = bytearray(whole[: draw.randrange(len(whole) + 1)])
        for _ in range(draw.randrange(3)):
            if raw:
                raw[draw.randrange(len(raw))] = draw.randrange(256)
        with closing(mmap.mmap(-1, max(1, len(raw)))) as data:
            data[: len(raw)] = bytes(raw)
            try:
                header = GgufHeader(data, "x.gguf")
                for key, value in header.metadata.items():
                    if isinstance(value, GgufArray):
                        read = header.texts if value.kind == 8 else header.numbers
                        read(key)
            except ConfigError:
                continue


def test_gguf_special_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    (tmp_path / "empty.gguf").touch()
    for name, match in (
        ("fifo.gguf", "not a regular file"),
        ("empty.gguf", "too short to be a GGUF file"),
        ("none.gguf", "No such file"),
    ):
        with pytest.raises(ConfigError, match=match), open_header(tmp_path / name):
            pass
