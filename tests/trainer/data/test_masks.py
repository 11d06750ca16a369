import numpy as np
import pytest
from PIL import Image

from diffusionpipe.costs import TensorSpec
from diffusionpipe.trainer.data.batches.batch import Augmentation, BatchSource, Rows, make_batch
from diffusionpipe.trainer.data.decoding.images import PictureError
from diffusionpipe.trainer.data.masks.holes import MaskSource, drawn_mask, load_mask, problems_of_mask
from diffusionpipe.trainer.data.masks.kinds import MaskKind
from diffusionpipe.trainer.data.randomness import generator
from diffusionpipe.trainer.data.scan.dataset import Dataset, Sample

DRAWS = 100_000


def bounds(mask):
    """Rows and columns of a mask that are all hole, as shares of the side, from each end: left, top, right, bottom."""
    columns, rows = mask.all(axis=0), mask.all(axis=1)
    return tuple(int(np.argmin(line)) for line in (columns, rows, columns[::-1], rows[::-1]))


def test_edges_have_the_published_distribution_of_sides_widths_and_areas():
    random = np.random.default_rng(0)
    kinds, areas, widths = {1: 0, 2: 0, 4: 0}, [], []
    for _ in range(2000):
        mask = drawn_mask(MaskKind.EDGES, random.random(4).tolist(), (100, 100))[0].numpy() == 1
        strips = [width for width in bounds(mask) if width]
        kinds[len(strips)] += 1
        areas.append(mask.mean())
        widths += strips[:1]
    shares = [kinds[count] / 2000 for count in (1, 2, 4)]
    assert shares == pytest.approx([0.3, 0.55, 0.15], abs=0.03)
    ratios = np.random.default_rng(1).uniform(0.15, 0.75, DRAWS)
    strip = (100 * ratios / 2).astype(int) / 100
    area = 0.3 * strip + 0.55 * 2 * strip + 0.15 * (1 - (1 - 2 * strip) ** 2)
    assert np.mean(areas) == pytest.approx(area.mean(), rel=0.03)
    assert np.mean(widths) / 100 == pytest.approx(strip.mean(), rel=0.03)


@pytest.mark.slow
def test_100_000_keyed_masks_are_within_one_percent_of_the_distribution():
    counts, area, width, sides = np.zeros(3), 0.0, 0.0, np.zeros(4)
    for position in range(DRAWS):
        numbers = generator(seed=7, purpose="mask", step=0, position=position).random(4, dtype=np.float32).tolist()
        mask = drawn_mask(MaskKind.EDGES, numbers, (64, 64))[0].numpy() == 1
        strips = np.array(bounds(mask))
        counts[{1: 0, 2: 1, 4: 2}[int((strips > 0).sum())]] += 1
        area, width, sides = area + mask.mean(), width + strips.max() / 64, sides + (strips > 0)
    ratios = np.linspace(0.15, 0.75, 600_001)
    strip = np.floor(64 * ratios / 2) / 64
    expected = (0.3 * strip + 0.55 * 2 * strip + 0.15 * (1 - (1 - 2 * strip) ** 2)).mean()
    assert counts / DRAWS == pytest.approx(np.array([0.3, 0.55, 0.15]), abs=0.01)
    assert sides / DRAWS == pytest.approx(np.full(4, 0.3 / 4 + 0.55 / 2 + 0.15), rel=0.01)
    assert area / DRAWS == pytest.approx(expected, rel=0.01)
    assert width / DRAWS == pytest.approx(strip.mean(), rel=0.01)


def test_boxes_lie_anywhere_and_have_15_to_75_percent_of_each_side():
    random = np.random.default_rng(0)
    shares, centres = [], []
    for _ in range(2000):
        mask = drawn_mask(MaskKind.BOXES, random.random(4).tolist(), (80, 120))[0].numpy() == 1
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        assert mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
        shares.append((len(rows) / 120, len(columns) / 80))
        centres.append((rows.mean() / 120, columns.mean() / 80))
    assert np.min(shares) > 0.13
    assert np.max(shares) <= 0.75
    assert np.mean(shares, axis=0) == pytest.approx([0.45, 0.45], abs=0.02)
    assert np.mean(centres, axis=0) == pytest.approx([0.5, 0.5], abs=0.02)


def files(folder, mask, size=(12, 8)):
    """A picture whose levels are its columns, and its mask."""
    levels = np.tile(np.arange(size[0], dtype=np.uint8) * 20, (size[1], 1))
    Image.fromarray(levels).convert("RGB").save(folder / "a.png")
    (folder / "masks").mkdir(exist_ok=True)
    Image.fromarray(mask.astype(np.uint8)).save(folder / "masks" / "a.png")
    return folder / "a.png", folder / "masks" / "a.png"


def right_half(size=(12, 8)):
    mask = np.zeros((size[1], size[0]))
    mask[:, size[0] // 2 :] = 255
    return mask


def test_a_files_mask_is_cut_and_mirrored_as_its_picture_is(tmp_path):
    files(tmp_path, right_half())
    source = BatchSource(
        dataset=Dataset(folder=tmp_path, samples=(Sample(name="a.png", text="a"),)),
        inputs=(TensorSpec(name="pixels", shape=(3, 8, 8)), TensorSpec(name="mask", shape=(1, 8, 8))),
        seed=0,
        augmentation=Augmentation(random_crop=True, flip=True),
        masks=MaskSource(kind=MaskKind.FILE, pattern=str(tmp_path / "masks" / "{name}.png")),
    )
    batch = make_batch(source, Rows(samples=(0,) * 20, positions=tuple(range(20)), step=0))
    column = ((batch["pixels"][:, 0] + 1) * 127.5).round() / 20  # of the picture, in each place
    assert (batch["mask"][:, 0] == (column >= 6)).all()
    assert len({tuple(row[0, 0].tolist()) for row in batch["mask"]}) > 2


def test_drawn_masks_depend_on_seed_step_and_position_alone(tmp_path):
    files(tmp_path, right_half())
    source = BatchSource(
        dataset=Dataset(folder=tmp_path, samples=(Sample(name="a.png", text="a"),)),
        inputs=(TensorSpec(name="mask", shape=(1, 16, 16)),),
        seed=0,
        masks=MaskSource(kind=MaskKind.EDGES),
    )
    together = make_batch(source, Rows(samples=(0,) * 6, positions=tuple(range(6)), step=3))["mask"]
    alone = make_batch(source, Rows(samples=(0,), positions=(4,), step=3))["mask"]
    assert (alone[0] == together[4]).all()
    later = make_batch(source, Rows(samples=(0,) * 6, positions=tuple(range(6)), step=4))["mask"]
    assert not (later == together).all()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.zeros((8, 12)), "the mask has no hole; make the pixels that a model shall draw white"),
        (np.full((8, 12), 255), "the mask has no known pixels; make the pixels that shall stay black"),
        (np.full((8, 12), 77), "96 grey pixels, e.g. of level 77; .* set levels from 128 on to 255 and others to 0"),
        (np.full((8, 10), 255), "the mask has 10 x 8 pixels and its picture 12 x 8"),
    ],
)
def test_a_file_that_is_no_mask_of_its_picture_is_refused(mask, message, tmp_path):
    picture, path = files(tmp_path, mask)
    with pytest.raises(PictureError, match=message) as error:
        load_mask(path, found=(12, 8), size=(8, 8))
    assert problems_of_mask(path, picture) == str(error.value)
    path.unlink()
    assert "its mask" in str(problems_of_mask(path, picture))


def test_transparent_pixels_of_a_mask_are_refused_for_they_may_mean_either(tmp_path):
    _, path = files(tmp_path, np.where(np.arange(12) < 4, 255, 0) * np.ones((8, 1)))
    mask = Image.open(path).convert("RGBA")
    mask.save(path)
    assert load_mask(path, found=(12, 8), size=(12, 8)).sum() == 32  # an alpha of 255 says nothing
    mask.putpixel((7, 3), (0, 0, 0, 0))
    mask.save(path)
    with pytest.raises(PictureError, match="transparent pixels, which say nothing; save it in black and white alone"):
        load_mask(path, found=(12, 8), size=(12, 8))
