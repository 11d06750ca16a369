"""What data workers need of a core is measured on a few rows, and counts where the ranks have no others."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from PIL import Image

from diffusionpipe.costs import TensorSpec
from diffusionpipe.costs.loading import NOTHING
from diffusionpipe.errors import DataError
from diffusionpipe.trainer.data.batches import loading_time as loading
from diffusionpipe.trainer.data.batches.batch import Augmentation, BatchSource
from diffusionpipe.trainer.data.batches.loader import StepLoader
from diffusionpipe.trainer.data.batches.loading_time import ROWS, batch_time
from diffusionpipe.trainer.data.scan.dataset import Dataset, Sample
from diffusionpipe.trainer.data.scan.skipped import Skipping, read_skipped


@dataclass(frozen=True, kw_only=True)
class Slow(StepLoader):
    """Each row takes so long on a clock of its own, and the first batch longer."""

    clock: list[float]
    row: float
    is_damaged: bool = False

    def load(self, step):
        if self.is_damaged:
            raise DataError("a picture is damaged")
        assert len(self.positions) <= ROWS
        usual = self.row * (1.5 if step == self.first_step + 2 else 1.0)
        self.clock.append((0.0 if self.clock else 100.0) + usual * len(self.positions))
        return {}


@pytest.fixture
def slow(tmp_path, monkeypatch):
    def make(row, *, rows=64, **options):
        clock = []
        monkeypatch.setattr(loading, "process_time", lambda: sum(clock))
        source = source_in(tmp_path)
        return Slow(source=source, batch=rows, positions=tuple(range(rows)), first_step=0, num_steps=9, clock=clock,
                    row=row, **options)  # fmt: skip

    return make


def source_in(folder):
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(folder / "0.png")
    return BatchSource(
        dataset=Dataset(folder=folder, samples=(Sample(name="0.png", text=None, label=None),)),
        inputs=(TensorSpec(name="pixels", shape=(3, 8, 8)),),
        seed=1,
        tokenizers={},
        null_label=None,
        augmentation=Augmentation(),
    )


def test_a_batch_takes_what_a_few_of_its_rows_take(slow):
    loader = slow(0.001)
    found = batch_time(loader)
    assert (found.least, found.usual, found.most) == pytest.approx((0.064, 0.064, 0.096))  # one try took longer
    assert len(loader.clock) == 2 + loading.TIMES


def test_of_long_rows_two_are_made(slow):
    loader = slow(2.0)
    assert batch_time(loader).usual == pytest.approx(128.0)
    assert len(loader.clock) == 2


def test_what_cannot_be_made_takes_no_time(slow):
    assert batch_time(slow(1.0, is_damaged=True)) == NOTHING
    assert batch_time(slow(1.0, rows=0)) == NOTHING


def test_damaged_pictures_are_not_listed_twice(tmp_path):
    """Training lists them; measuring does not."""
    source = replace(source_in(tmp_path), skipping=Skipping(folder=tmp_path, most=9))
    (tmp_path / "0.png").write_bytes(b"no picture")
    assert batch_time(StepLoader(source=source, batch=4, positions=(0, 1), first_step=0, num_steps=1)) == NOTHING
    assert not read_skipped(tmp_path)


def test_real_pictures_take_time(tmp_path):
    loader = StepLoader(source=source_in(tmp_path), batch=4, positions=(0, 1, 2), first_step=0, num_steps=1)
    assert batch_time(loader).least > 0
