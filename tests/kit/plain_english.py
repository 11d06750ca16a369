"""The one list of rules for plain English: documents, docstrings and texts that users see are read with it.

A rule is data: a pattern of words that has to be read twice, the reason, and better words. `tests/docs` reads the
documents and the docstrings of src with them, `tests/cli` the messages, the logs and the help. There is no list of
exceptions. The rules accept ordinary technical English: `tests/docs/test_plain_docstrings.py` counts their findings in
the docstrings of pydantic, numpy and huggingface_hub.
"""

import ast
import inspect
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Place(StrEnum):
    """The part of a text that a rule reads."""

    ANYWHERE = "anywhere"
    OPENING = "opening"
    """The first words of a docstring: an editor shows it without the docstring before."""
    CLOSING = "closing"
    """The last character of a docstring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A way to write that a reader has to read twice."""

    name: str
    pattern: str
    """A regular expression, searched in prose whose code is replaced by CODE."""
    reason: str
    """Why a reader stumbles over it."""
    better: str
    """Advice: the words to write in its place."""
    place: Place = Place.ANYWHERE
    only_shown: str = ""
    """The reason why it applies to shown texts alone; empty: it applies everywhere."""


RULES = (
    Rule(
        name="what for a noun",
        pattern=r"(?:^|[.;,(] |(?<!\)): |\band )[Ww]hat\b(?![^.]*\?)"
        r"(?! (?:is this|kinds? of|are the|\w+ (?:\w+ )?to use|happens (?:if|when)))",
        reason="a clause in the place of a noun hides which thing is meant",
        better='name the thing: "The layers that ...", not "What ..."',
    ),
    Rule(
        name="is what",
        pattern=r"(?<!which )\b(?:is|are|was|were) what\b(?! we\b)",
        reason="a clause in the place of a noun hides which thing is meant",
        better='name the thing: "is the part that ...", not "is what ..."',
    ),
    Rule(
        name="whoever",
        pattern=r"\b[Ww]hoever\b|\b[Bb]y who\b",
        reason="the actor is missing",
        better='name the actor: "the rank that ...", not "whoever ..."',
    ),
    Rule(
        name="whatever",
        pattern=r"\b[Ww]hatever (?:is|are|was|it|they|a|the|stands|happens)\b|(?:^|[.;:,(] )[Ww]hatever\b(?! its\b)",
        reason="the thing is missing",
        better='name the thing: "any error that ...", "each key that ..."',
    ),
    Rule(
        name="nobody",
        pattern=r"\b[Nn]obody\b(?! else\b)",
        reason="programs and ranks act here, not persons",
        better='"no rank", "no caller", "nothing"',
    ),
    Rule(
        name="so many",
        pattern=r"\b[Ss]o (?:many|much|often)\b(?! (?:that|as)\b)",
        reason="it points at a number that stands elsewhere",
        better='name the number: "`count` of them", "this number of ..."',
    ),
    Rule(
        name="stands",
        pattern=r"\bstands?\b(?!-in| for\b)|\bstanding (?:in|at|on|there|before|beside|after|still)\b",
        reason="layers and numbers do not stand",
        better='"is", "is placed" or "comes"',
    ),
    Rule(
        name="trained by",
        pattern=r"\b(?:is|are|be|was|were) trained by\b",
        reason="a passive whose actor comes last",
        better='"DiffusionPipe trains ..." or "trains with"',
    ),
    Rule(
        name="old words",
        pattern=r"\b(?:likewise|wherefore|thereof|whereof|anew|afresh)\b|\bto and fro\b|\bas if left out\b",
        reason="words of old books",
        better='"too", "again", "of it"',
    ),
    Rule(
        name="that of",
        pattern=r"(?<!as )(?<!than )(?<!with )(?<!to )(?<!from )(?<!match )(?<!matching )(?<!equals )"
        r"(?<!equal )(?<!like )(?<!instead of )(?<!will be )"
        r"\b[Tt](?:hat|hose) of\b",
        reason="the reader has to look back for the noun",
        better='repeat the noun: "the time of ...", "the model\'s time"; or compare: "the same as that of ..."',
    ),
    Rule(
        name="behind",
        pattern=r"(?<!left )(?<!lags )(?<!lag )(?<!idea )(?<!mechanism )(?<!data )(?<!falls )(?<!fall )"
        r"\b[Bb]ehind\b(?! the scenes?\b)(?!\.)",
        reason="a place in the place of a time",
        better='"after", "follows", "in the background", "hidden by"',
    ),
    Rule(
        name="is no",
        pattern=r"(?<![Tt]here )(?<![Dd]efault )\b(?:is|are) no (?!use\b|longer\b"
        r"|more\b|less\b|greater\b|larger\b|smaller\b)",
        reason="the negation comes too late",
        better='"is not a ..."',
    ),
    Rule(
        name="has not a",
        pattern=r"\b(?:has|have) not\b(?! (?:yet |also )?(?:been|run|got|begun|taken|become|given|had|read|\w+ed)\b)",
        reason="the negation of a possession needs do",
        better='"does not have ..." or "has no ..."',
    ),
    Rule(
        name="goes on",
        pattern=r"\bgo(?:es)? on\b",
        reason="a phrase of speech with several meanings",
        better='"continues" or "resumes"',
    ),
    Rule(
        name="knows",
        pattern=r"\bknows\b(?! (?:how|about|its own)\b)",
        reason="programs do not know",
        better='"has", "reads", "supports" or "is given"',
    ),
    Rule(
        name="rests in",
        pattern=r"\brests? in\b",
        reason="memory does not rest",
        better='"is kept in"',
    ),
    Rule(
        name="is of another",
        pattern=r"\bis of (?:another|step)\b",
        reason="the noun that it belongs to is missing",
        better='"belongs to another ..."',
    ),
    Rule(
        name="is told",
        pattern=r"\bis told\b",
        reason="programs are not told; they read, receive or are called",
        better='"receives", "reads", "is called with"',
    ),
    Rule(
        name="continues",
        pattern=r"(?:Of|And|Or|But|of|and|or|but|that|so (?:often|many|much)|if (?:that|this|it|not)|at (?:most|least)"
        r"|unless|with|then)\b|The same (?:for|of|with|without|as plain)\b",
        reason="a first line that only continues another docstring says nothing by itself",
        better="begin with the noun: the value, its unit, then whose it is",
        place=Place.OPENING,
    ),
    Rule(
        name="continued",
        pattern=r"[,;]",
        reason="a docstring that ends with a comma or a semicolon continues in another, which no editor shows",
        better="end with a full stop, and say in the next docstring what that one is",
        place=Place.CLOSING,
    ),
    Rule(
        name="as in",
        pattern=r"As (?:in\b|CODE)",
        reason="the reader has to look up the other name to learn anything",
        better="say it again in short, then name the other place",
        place=Place.OPENING,
    ),
    Rule(
        name="mutable",
        pattern=r"Mutable\b",
        reason="a remark where the thing's name is expected",
        better="say first what it holds or does, then that it changes",
        place=Place.OPENING,
    ),
    Rule(
        name="no valid",
        pattern=r"\bno valid\b",
        reason="it does not say what is wrong",
        better='"is not a ..."',
        only_shown="a refusal has to name the fault and the remedy; a reference may count valid choices",
    ),
    Rule(
        name="says it",
        pattern=r"\bsays? (?:it|so)\b",
        reason="a pronoun without its noun",
        better="repeat the value or the key",
        only_shown="a message is read alone; in a document or a docstring the sentence before holds the noun",
    ),
    Rule(
        name="1 is none",
        pattern=r"\b1 is (?:without|none)\b",
        reason="the noun is missing",
        better='"1 turns it off"',
        only_shown="help is read alone; in a document or a docstring the sentence before holds the noun",
    ),
    Rule(
        name="in turn",
        pattern=r"\bin turn F\b",
        reason="the order of the words hides the verb",
        better='"runs F and then ..."',
    ),
    Rule(
        name="keys",
        pattern=r"\b[Kk]eys (?:the|all)\b",
        reason="a noun as a verb",
        better='"is the seed of ..."',
        only_shown="a document may list the keys that all tables share",
    ),
)


class Hit(NamedTuple):
    """A phrase that a rule refuses."""

    rule: Rule
    words: str
    """The words around it."""

    def __str__(self) -> str:
        """The words, the name of the rule, and better words."""
        return f"...{self.words}... ({self.rule.name}): {self.rule.better}"


_ENDS = {Place.ANYWHERE: ("", ""), Place.OPENING: (r"\A", ""), Place.CLOSING: ("", r"\Z")}


def paragraphs(text: str) -> Iterator[str]:
    """Each paragraph of a docstring, without doctests and with CODE for code."""
    text = re.sub(
        r"^```.*?^```$|^ *>>> .*?(?:\n\s*\n|\Z)", "\n\n", inspect.cleandoc(text), flags=re.MULTILINE | re.DOTALL
    )
    for paragraph in re.split(r"\n\s*\n", text):
        yield " ".join(without_code(paragraph).split())


def without_code(text: str) -> str:
    """Prose with CODE for each piece of code, and the words of a link for the link."""
    return re.sub(r"`+[^`]*`+|\[([^\]]*)\]\([^)]*\)", lambda code: code[1] or "CODE", text)


def hits(paragraph: str, *, places: Collection[Place] = (Place.ANYWHERE,), is_shown: bool = False) -> Iterator[Hit]:
    """Each phrase of a paragraph that a rule refuses."""
    for rule in RULES:
        if rule.place in places and (is_shown or not rule.only_shown):
            before, after = _ENDS[rule.place]
            for found in re.finditer(f"{before}(?:{rule.pattern}){after}", paragraph):
                yield Hit(rule, paragraph[max(0, found.start() - 30) : found.end() + 30])


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of each docstring: of the module, of classes and functions, and of fields and constants."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def refused(docstring: str) -> list[Hit]:
    """Each phrase of a docstring that a rule refuses."""
    first, *others = paragraphs(docstring)
    ends = [{Place.ANYWHERE} for _ in (first, *others)]
    ends[0].add(Place.OPENING)
    ends[-1].add(Place.CLOSING)
    return [hit for part, places in zip((first, *others), ends, strict=True) for hit in hits(part, places=places)]
