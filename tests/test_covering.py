"""Cases that cover all pairs."""

from itertools import combinations, product

import pytest
from kit.covering import covering, meetings


@pytest.mark.parametrize("sizes", [(2, 3, 10), (4, 4, 4), (3, 3, 3, 3), (1, 5), (2, 2, 2, 2, 2, 2)])
def test_every_two_values_meet_and_few_cases_do_it(sizes):
    factors = [range(size) for size in sizes]
    cases = covering(*factors)
    assert len(cases) == len(set(cases))
    for (one, values), (other, others) in combinations(enumerate(factors), 2):
        assert {(case[one], case[other]) for case in cases} == set(product(values, others))
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert len(cases) <= 1.5 * largest * second + 2


def test_cases_that_are_kept_come_first_and_those_that_cannot_be_do_not_come():
    cases = covering("ab", "cd", "ef", first=[("b", "d", "f")], without=[("a", "c", "e")])
    assert cases[0] == ("b", "d", "f")
    assert ("a", "c", "e") not in cases
    met = set().union(*map(meetings, cases))
    assert met == set().union(*(meetings(case) for case in product("ab", "cd", "ef") if case != ("a", "c", "e")))
