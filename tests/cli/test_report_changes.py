"""The change between two states of a page's data, applied by a reader that is written here and not in the page."""

import json

from hypothesis import given
from hypothesis import strategies as st

from diffusionpipe.workflows.report.changes import change_of

values = st.recursive(
    st.none() | st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=25,
)


def applied(old, change):
    if "new" in change and "kept" not in change:
        return change["new"]
    if "keys" in change:
        left = {key: value for key, value in old.items() if key not in change["gone"]}
        return left | {key: applied(old.get(key), one) for key, one in change["keys"].items()}
    first, last = change["kept"]
    middle = change.get("new", [])
    if "items" in change:
        middle = [
            old[one["old"]] if "old" in one else applied(old[place] if place < len(old) else None, one)
            for place, one in enumerate(change["items"], first)
        ]
    return [*old[:first], *middle, *old[len(old) - last :]]


@given(values, values)
def test_a_change_makes_the_new_data_of_the_old_ones(old, new):
    change = json.loads(json.dumps(change_of(old, new)))
    assert applied(old, change) == new


@given(st.dictionaries(st.sampled_from("abcd"), values, min_size=1))
def test_equal_data_have_an_empty_change(data):
    assert change_of(data, json.loads(json.dumps(data))) == {"keys": {}, "gone": []}


@given(st.sets(st.integers(0, 7)))
def test_samplings_that_stay_are_not_in_a_change_also_where_some_between_them_are_left_out(places):
    steps = [{"step": place, "pictures": [f"{place}" * 2000]} for place in range(9)]
    kept = [steps[place] for place in sorted(places)]
    assert len(json.dumps(change_of({"steps": steps[:-1]}, {"steps": [*kept, steps[-1]]}))) < 2600
