"""Files of two models that hold the same bytes."""

from unittest import mock

import pytest

from diffusionpipe.models.compose import common_encoders


@pytest.fixture
def files(tmp_path):
    """Three in different folders, the first two with equal contents."""
    paths = [tmp_path / name / "model.safetensors" for name in ("one", "two", "three")]
    for path, text in zip(paths, ("weights", "weights", "others!"), strict=True):
        path.parent.mkdir()
        path.write_text(text)
    return paths


def test_files_are_the_same_by_their_bytes(files):
    one, two, three = files
    assert common_encoders._is_same(one, two)
    assert not common_encoders._is_same(one, three)


def test_a_link_and_what_the_hub_names_by_its_hash_are_not_read(files, tmp_path):
    (tmp_path / "link").symlink_to(files[0])
    for repository in ("base", "super"):
        blob = tmp_path / repository / "blobs" / ("a1" * 32)
        blob.parent.mkdir(parents=True)
        blob.write_text("weights")
        (tmp_path / repository / "model.safetensors").symlink_to(blob)
    with mock.patch.object(common_encoders, "cmp", side_effect=AssertionError("it was read")):
        assert common_encoders._is_same(files[0], tmp_path / "link")
        assert common_encoders._is_same(*(tmp_path / name / "model.safetensors" for name in ("base", "super")))
        with pytest.raises(AssertionError, match="it was read"):
            common_encoders._is_same(files[0], files[1])
