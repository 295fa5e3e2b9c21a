"""What `python -m tests.walk` notes, and its counts."""

import json
import subprocess
import sys

from tests.walk.ways import Call, walk


def call(file: str, *calls: Call, made: tuple[str, ...] = (), bounds: bool = False) -> Call:
    return Call(file=file, function="f", calls=list(calls), made=list(made), bounds=bounds)


def files(*calls: Call) -> list[str]:
    return [stay.file for stay in walk(calls).stays]


def test_walk_calls_within_one_file_are_one_stay():
    assert files(call("a", call("a", call("a", bounds=True)))) == ["a"]


def test_walk_return_to_running_function_is_no_stay():
    end = call("b", bounds=True)
    assert files(call("a", call("b", made=("Form",)), call("c", end))) == ["a", "b", "c", "b"]


def test_walk_reentering_a_file_in_a_row_is_one_stay():
    assert files(call("a", call("b", made=("Form",)), call("b", bounds=True))) == ["a", "b"]


def test_walk_call_without_objects_or_successor_is_an_aside():
    found = walk([call("a", call("clock", call("timer")), call("b", bounds=True))])
    assert [stay.file for stay in found.stays] == ["a", "b"]
    assert found.asides == {"clock": 1}


def test_walk_object_made_by_helper_counts_for_its_stay():
    found = walk([call("a", call("b", call("c", made=("Form", "Form"))), bounds=True)])
    assert [(stay.file, stay.made) for stay in found.stays] == [("a", []), ("b", []), ("c", ["Form", "Form"])]
    assert found.num_objects == 2


def test_walk_parts_are_listed_and_make_no_stay():
    found = walk([call("a", call("b", made=("SamplingParams",)), bounds=True)])
    assert [stay.file for stay in found.stays] == ["a"]
    assert (found.num_objects, found.parts) == (0, {"SamplingParams": 1})


_FOLLOWED = """
import sys
from pathlib import Path

import msgspec
from tests.walk import recorded
from tests.walk.ways import Way

msgspec.Struct = recorded.NotedStruct
from router.api.request import beam_search_options
from router.api.request.generation_defaults import GenerationDefaults
from tandem.values.sampling import SamplingParams

for kind, file, function in (
    ("BeamSearchParams", "beam_search_options", "parse_beam_search"),
    ("SamplingParams", "generation_defaults", "fill"),
):
    place = (f"router/api/request/{file}.py", function)
    recorded._BEGINNINGS[place] = Way(name=kind, title="", begins=place, ends=place)
options = dict(wanted=True, width=2, early_stopping=None, streams=False, votes=False)
defaults = GenerationDefaults(sampling={"temperature": recorded.TEMPERATURE})
sys.setprofile(recorded._profile(Path(sys.argv[1])))
beam_search_options.parse_beam_search(length_penalty=recorded.TEMPERATURE, **options)
defaults.fill(SamplingParams(), frozenset())
sys.setprofile(None)
"""


def test_walk_notes_structs_and_named_tuples(tmp_path):
    """Compiled code makes the former, code without a file the latter."""
    subprocess.run([sys.executable, "-c", _FOLLOWED, str(tmp_path)], check=True)
    for kind in ("BeamSearchParams", "SamplingParams"):
        [first] = json.loads((tmp_path / f"{kind}.json").read_text())
        assert first["made"] == [kind]
