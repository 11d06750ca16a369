"""The effects of the keys of [data] on a cache of encoders' results: whether it can be used, and how many it holds."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from diffusionpipe.trainer.data.text.caption_rules import CaptionRules, texts_of
from diffusionpipe.trainer.recipe.schema import DataSection


class OnCache(StrEnum):
    """The effect that a key of [data] has on a cache of encoders' results."""

    NOTHING = "nothing that is kept depends on it"
    KEYED = "another value has results of its own, and the old ones stay"
    MULTIPLIES = "each sample has several results, one for each value drawn"
    REPLAYED = "drawn for each step from the kept results"
    FORBIDS = "each sample is new each time, so its results are not kept"


_OF_DATA: Mapping[OnCache, str] = {
    OnCache.NOTHING: "validation same_size batching weigh min_side workers allow_growth on_error max_skipped masks "
    "mask_file loss_mask",
    OnCache.KEYED: "train sources columns captions resolution sizes aspects multiple max_cut enlarge height frame_rate "
    "caption_chunks clip_skip",
    OnCache.MULTIPLIES: "flip",
    OnCache.REPLAYED: "caption_dropout",
    OnCache.FORBIDS: "random_crop frames patches",
}
_OF_CAPTIONS: Mapping[OnCache, str] = {
    OnCache.KEYED: "prefix suffix trigger keep_first keep_mark separator",
    OnCache.MULTIPLIES: "lines alternatives",
    OnCache.REPLAYED: "dropout",
    OnCache.FORBIDS: "shuffle tag_dropout",
}
_OF_SOURCES: Mapping[OnCache, str] = {
    OnCache.NOTHING: "repeats loss_weight loss_mask",
    OnCache.KEYED: "path regularisation columns captions resolution",
}
ON_CACHE: Mapping[str, OnCache] = {
    f"{section}.{key}": effect
    for section, effects in (
        ("data", _OF_DATA),
        ("data.captions", _OF_CAPTIONS),
        ("data.sources.NAME", _OF_SOURCES),
    )
    for effect, keys in effects.items()
    for key in keys.split()
}
"""Dotted key of [data] -> its effect on a cache of encoders' results.

Masks of holes and of losses are made for each step, and so are latents of pictures with holes.
"""

_CHOICE = re.compile(r"\{([^{}]*\|[^{}]*)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The numbers of pictures and texts whose encoder results a cache would keep, and of results for each sample."""

    pictures: int
    """The number of pictures and clips whose results are kept; 0 if each is new each time."""
    views: float
    """The mean number of views of each picture: its sizes, and each of them mirrored."""
    texts: int
    """The number of texts whose results are kept, the empty text included."""
    variants: float
    """The mean number of texts of a sample."""


def new_pictures(data: DataSection) -> list[str]:
    """The keys set in a recipe by which every picture or clip is another one each time it is seen; [] for none."""
    asked = (
        ("data.random_crop", data.random_crop),
        ("data.frames", data.has_clips),
        ("data.patches", data.patches is not None),
    )
    return [key for key, is_set in asked if is_set]


def new_texts(rules: CaptionRules) -> list[str]:
    """The keys set in these rules by which every text is another one each time it is made; [] for none."""
    asked = (("data.captions.shuffle", rules.shuffle), ("data.captions.tag_dropout", rules.tag_dropout > 0))
    return [key for key, is_set in asked if is_set]


def counts_of(data: DataSection, samples: Iterable[tuple[int, tuple[str, ...]]], sizes: float = 1.0) -> Counts:
    """The numbers of pictures and texts whose encoder results a cache would keep for these samples.

    `samples`: (index of the source, captions) of each sample. `sizes`: the mean number of sizes in which a picture is
    seen.
    """
    own = list(samples)
    treatments = data.treatments
    variants: dict[tuple[int, str], int] = {}
    drawn = 0
    for source, captions in own:
        rules = treatments[source].captions
        if new_texts(rules):
            continue
        for text in texts_of(captions, rules):
            # One text for each combination.
            count = prod(found.count("|") + 1 for found in _CHOICE.findall(text)) if rules.alternatives else 1
            variants[source, text] = count
            drawn += count
    # Then the empty text is kept too.
    drops = data.caption_dropout > 0 or any(share for one in treatments for _, share in one.captions.encoder_dropout)
    kept = sum(not new_texts(treatments[source].captions) for source, _ in own)
    return Counts(
        pictures=0 if new_pictures(data) else len(own),
        views=sizes * (2 if data.flip else 1),
        texts=sum(variants.values()) + drops if variants else 0,
        variants=drawn / kept if kept else 1.0,
    )
