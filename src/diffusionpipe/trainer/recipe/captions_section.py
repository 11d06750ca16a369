"""[data.captions]: how texts are made from captions, each time that a sample is seen."""

from collections.abc import Iterator
from typing import Annotated, Self

from pydantic import Field, model_validator

from diffusionpipe.trainer.data.text.caption_rules import KEPT, TRIGGER, CaptionRules
from diffusionpipe.trainer.recipe.section import Fraction, Maybe, ProperFraction, Section, raise_problems

_OF_TAGS = ("keep_first", "keep_mark", "separator")


class CaptionsSection(Section):
    """[data.captions]: how texts are made from captions, each time that a sample is seen."""

    lines: bool = False
    """Each line of a caption that is not blank is a caption of its own; one of them is drawn."""
    alternatives: bool = False
    """`{a|b}` in a caption is read as `a` or as `b`, drawn each time; `{{` and `}}` are braces. Other braces, such as a
    pair inside another, are read as they are, and the block before the first step counts such captions."""
    prefix: str = ""
    """Text before every caption, joined as it is."""
    suffix: str = ""
    """Text after every caption, joined as it is."""
    trigger: Maybe[Annotated[str, Field(min_length=1)]] = None
    """A word for the new subject: it replaces `[trigger]`, and begins captions that have neither. `lora.trigger` is the
    same word, unless it is set."""
    shuffle: bool = False
    """The tags of a caption, which `separator` parts, come in another order each time."""
    tag_dropout: ProperFraction = 0.0
    """Share of the tags that are left out, drawn for each tag."""
    keep_first: Annotated[int, Field(ge=0, le=1000)] = 0
    """Tags at the start that are neither moved nor left out; a trigger word in front is one of them."""
    keep_mark: Annotated[str, Field(min_length=1)] = KEPT
    """Mark in a caption, which is not read itself: the tags before it keep their places, and those after a second one;
    instead of `keep_first`."""
    separator: Annotated[str, Field(min_length=1)] = ","
    """The text between two tags; they are joined by it and a space."""
    dropout: dict[str, Fraction] = Field(default_factory=dict)
    """Share of captions that one text encoder does not read, by its name, e.g. `{ text_encoder_3 = 0.3 }`, beside
    `data.caption_dropout`, which is for all encoders."""

    @model_validator(mode="after")
    def _every_key_has_an_effect(self) -> Self:
        raise_problems(self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        rules = self.rules
        for key in _OF_TAGS:
            given = getattr(self, key) != type(self).model_fields[key].default
            if given and not rules.has_tags and not (key == "separator" and self.trigger is not None):
                yield f"{key}: no tags are moved or left out; set shuffle = true or tag_dropout, or remove {key}"
        for key in ("separator", "keep_mark"):
            if not getattr(self, key).strip():
                yield f"{key}: it is blank, and tags are parted at words; use a mark such as a comma"
        for key in ("prefix", "suffix", "trigger"):
            if "\0" in (getattr(self, key) or ""):
                yield f"{key}: it holds a NUL character; remove it"
        if self.trigger is not None and TRIGGER in self.trigger:
            yield f"trigger: it holds {TRIGGER}, which stands for it in captions; choose another word"

    @property
    def rules(self) -> CaptionRules:
        """The rules by which texts are made from captions, with the values of these keys."""
        return CaptionRules(
            lines=self.lines,
            alternatives=self.alternatives,
            prefix=self.prefix,
            suffix=self.suffix,
            trigger=self.trigger,
            separator=self.separator,
            shuffle=self.shuffle,
            tag_dropout=self.tag_dropout,
            keep_first=self.keep_first,
            keep_mark=self.keep_mark,
            encoder_dropout=tuple(self.dropout.items()),
        )
