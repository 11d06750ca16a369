"""A tiny family in float64: diffusers' pipeline, our graph over the same weights, and inputs."""

from copy import deepcopy

import torch
from kit.tiny_described import PIPELINES, RESOLUTIONS
from kit.tiny_models import randomise_parameters

from diffusionpipe.models.graphs.run import needed_layers, run_layers
from diffusionpipe.models.objectives.objective import Objective, ObjectiveSettings, Prediction
from diffusionpipe.models.opening.folder import REGISTRY
from diffusionpipe.trainer.data.text.tokens import token_ids, token_mask
from diffusionpipe.trainer.inference.conditions import open_tokenizer

CAPTIONS = ["a b", "abc de fghij klmnop qrst " * 3, ""]


class Opened:
    """A tiny pipeline in float64, its graph over the same modules, and inputs."""

    def __init__(self, kind, folder, clip=None):
        self.pipeline = PIPELINES[kind]()
        self.size = RESOLUTIONS.get(kind, 16)
        self.pipeline.save_pretrained(folder)
        self.pipeline.set_progress_bar_config(disable=True)
        components = {name: getattr(self.pipeline, name) for name in REGISTRY[kind].components}
        for seed, component in enumerate(components.values()):
            randomise_parameters(component.double(), seed)
        # diffusers runs a model that is not cut
        components |= {
            name: deepcopy(part.eval()) for name, part in components.items() if name.startswith("text_encoder")
        }
        prediction = Prediction.EPSILON if kind == "PixArtSigmaPipeline" else Prediction.FLOW_MATCHING
        objective = Objective(ObjectiveSettings(prediction=prediction), {})
        sizes = {"resolution": self.size} | ({} if clip is None else {"clip": clip})
        self.graph = REGISTRY[kind].graph(components, objective=objective, dtype="float64", **sizes)
        self._folder = folder
        generator = torch.Generator().manual_seed(0)
        shape = next(spec.shape for spec in self.graph.inputs if spec.name == "noise")
        self.inputs = self.texts(CAPTIONS) | {
            "noisy": torch.randn((3, *shape), generator=generator, dtype=torch.float64),
            "guidance": torch.full((3,), 6.0),
            "frame_rate": torch.full((3,), 25.0),
            "timesteps": torch.tensor([900, 500, 20]).to(torch.float32 if objective.is_flow else torch.int64),
        }

    def texts(self, captions):
        """What the tokenizers make of the captions, a row for each."""
        shapes = {spec.name: spec.shape for spec in self.graph.inputs}
        tokenizer, length = open_tokenizer(self._folder), shapes["input_ids"][0]
        more = {}
        if "input_ids_2" in shapes:
            other = open_tokenizer(self._folder, "input_ids_2")
            more["input_ids_2"] = token_ids(other, captions, shapes["input_ids_2"][0])
        return more | {
            "input_ids": token_ids(tokenizer, captions, length),
            "input_mask": token_mask(tokenizer, captions, length),
        }

    def batch(self, count, seed=1):
        """Raw inputs of as many samples, functions of the arguments."""
        generator = torch.Generator().manual_seed(seed)
        texts = self.texts([CAPTIONS[(number + seed) % len(CAPTIONS)] for number in range(count)])
        found = {spec.name: texts[spec.name] for spec in self.graph.inputs if spec.name in texts}
        for spec in self.graph.inputs:
            if spec.name not in found:
                found[spec.name] = torch.rand(
                    (count, *spec.shape), generator=generator, dtype=getattr(torch, spec.dtype)
                )
        return found

    def run(self, target, **given):
        inputs = self.inputs | given
        layers = needed_layers(self.graph.layers, [target], inputs)
        return run_layers(layers, self.graph.components, inputs, targets=[target])[target]
