"""The tensors of a cache folder: a shard that was removed and written again is read again."""

import pytest
import torch

from diffusionpipe.trainer.data.cache.files import CacheFiles, write_shard

ROWS = {"a" * 32: torch.arange(4.0), "b" * 32: torch.arange(6.0).view(2, 3)}


def damaged(shard):
    shard.write_bytes(shard.read_bytes()[:-4])


def changed(shard):
    """One bit of a tensor, which the header does not show."""
    data = bytearray(shard.read_bytes())
    data[-2] ^= 0x40
    shard.write_bytes(data)


def removed(shard):
    shard.unlink()


@pytest.mark.parametrize("is_read_before", [True, False])
@pytest.mark.parametrize("lose", [damaged, changed, removed])
def test_a_shard_that_is_lost_and_written_again_is_read(tmp_path, lose, is_read_before):
    shard = write_shard(tmp_path, ROWS)
    files = CacheFiles(tmp_path)
    if is_read_before:
        assert all(torch.equal(files.read(key), row) for key, row in ROWS.items())
    lose(shard)
    # The changed bit is in the last tensor.
    assert any(files.read(key) is None for key in ROWS)
    assert not files.holds("b" * 32)
    assert write_shard(tmp_path, ROWS) == shard
    for key, row in ROWS.items():
        found = files.read(key)
        assert found is not None
        assert torch.equal(found, row)
