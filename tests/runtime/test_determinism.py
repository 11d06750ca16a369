import pytest
import torch

from diffusionpipe.runtime.machine.determinism import WORKSPACE, be_deterministic


@pytest.fixture
def unchanged():
    """torch's settings, as they were, after the test."""
    before = torch.are_deterministic_algorithms_enabled()
    filled, cudnn = torch.utils.deterministic.fill_uninitialized_memory, torch.backends.cudnn.deterministic
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.backends.cudnn.deterministic = cudnn


@pytest.mark.usefixtures("unchanged")
def test_kernels_that_are_not_deterministic_are_refused_and_a_users_workspace_stays():
    own: dict[str, str] = {}
    be_deterministic(own)
    assert own == {WORKSPACE: ":4096:8"}
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.empty(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)
    chosen = {WORKSPACE: ":16:8"}
    be_deterministic(chosen)
    assert chosen == {WORKSPACE: ":16:8"}
    assert not torch.utils.deterministic.fill_uninitialized_memory
