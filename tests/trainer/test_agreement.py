import pytest

from diffusionpipe.errors import ConfigError
from diffusionpipe.runtime.job.agreement import from_first, on_all


def fail():
    raise ConfigError("there is no such folder")


def test_one_rank_gets_what_it_makes():
    assert from_first(lambda: 3) == on_all(lambda: 3) == 3


@pytest.mark.parametrize("together", [from_first, on_all])
def test_a_problem_of_all_ranks_is_marked_as_such(together):
    with pytest.raises(ConfigError, match="no such folder") as caught:
        together(fail)
    assert caught.value.is_common
    assert not ConfigError("another").is_common
