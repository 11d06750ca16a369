"""A training loop of the library; `python loop_program.py FOLDER JSON-OF-SIZES [MOMENT]`, also under torchrun.

MOMENT is a step after whose save the program is killed.
"""

import json
import os
import signal
import sys

import torch
from torch import nn

import diffusionpipe as dp


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden):
        return hidden + self.down(nn.functional.gelu(self.up(self.norm(hidden))))


def loss(prediction, target):
    return nn.functional.cross_entropy(prediction, target, reduction="none")


def main(folder, sizes, moment):
    torch.manual_seed(0)
    x, y = torch.randn(32, 16), torch.randint(10, (32,))
    blocks = [nn.Linear(16, 64), *(Block(64) for _ in range(6)), nn.Linear(64, 10)]
    model = dp.pipeline(blocks, loss=loss, example=(x[:4], y[:4]))
    choice = dp.plan(dp.profile(model, analytic="cpu-1-thread"), cluster="cpux2", batch=32, **sizes)
    with dp.run(model, choice.plan) as run:
        run.optimizer(torch.optim.AdamW, lr=1e-3, clip_norm=1.0)
        for step in range(run.resume(f"{folder}/saved"), 20):
            run.print(step, run.step(x, y))
            run.save(f"{folder}/saved", step + 1)
            if step + 1 == moment:
                os.kill(os.getpid(), signal.SIGKILL)
        run.timeline().compare(choice).save(f"{folder}/timeline.png")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
