"""Numbers with the noun that they count, in words."""

_OF_ONE = {
    "captions": "caption",
    "clips": "clip",
    "do": "does",
    "end": "ends",
    "files": "file",
    "folders": "folder",
    "have": "has",
    "classes": "class",
    "are": "is",
    "chunks": "chunk",
    "lines": "line",
    "links": "link",
    "pictures": "picture",
    "point": "points",
    "places": "place",
    "prompts": "prompt",
    "samples": "sample",
    "steps": "step",
    "them": "it",
}


def counted(number: int, phrase: str) -> str:
    """The number and a phrase in the plural, e.g. "pictures that do not exist"; of one it becomes the singular."""
    words = [_OF_ONE.get(word, word) for word in phrase.split(" ")] if number == 1 else [phrase]
    return f"{number:,} {' '.join(words)}"
