"""What `python -m tests.walk` counts."""

from tests.walk.ways import Call, walk


def call(file: str, *calls: Call, made: tuple[str, ...] = (), bounds: bool = False) -> Call:
    return Call(file=file, function="f", calls=list(calls), made=list(made), bounds=bounds)


def files(*calls: Call) -> list[str]:
    return [stay.file for stay in walk(calls).stays]


def test_walk_calls_within_one_file_are_one_stay():
    assert files(call("a", call("a", call("a", bounds=True)))) == ["a"]


def test_walk_coming_back_to_a_running_function_is_no_stay_and_entering_again_is():
    end = call("b", bounds=True)
    assert files(call("a", call("b", made=("Form",)), call("c", end))) == ["a", "b", "c", "b"]


def test_walk_entering_the_same_file_twice_in_a_row_is_one_stay():
    assert files(call("a", call("b", made=("Form",)), call("b", bounds=True))) == ["a", "b"]


def test_walk_call_that_makes_nothing_and_leads_nowhere_is_an_aside():
    found = walk([call("a", call("clock", call("timer")), call("b", bounds=True))])
    assert [stay.file for stay in found.stays] == ["a", "b"]
    assert found.asides == {"clock": 1}


def test_walk_object_made_behind_a_helper_counts_with_the_stay_that_made_it():
    found = walk([call("a", call("b", call("c", made=("Form", "Form"))), bounds=True)])
    assert [(stay.file, stay.made) for stay in found.stays] == [("a", []), ("b", []), ("c", ["Form", "Form"])]
    assert found.num_objects == 2


def test_walk_parts_are_listed_and_make_no_stay():
    found = walk([call("a", call("b", made=("SamplingParams",)), bounds=True)])
    assert [stay.file for stay in found.stays] == ["a"]
    assert (found.num_objects, found.parts) == (0, {"SamplingParams": 1})
