"""Models of the Hugging Face Hub: their copies on this machine, or one error that says what to do."""

from collections.abc import Sequence
from pathlib import Path

from diffusionpipe.errors import ModelError

_LONG = 200


_VARIANTS = ("fp16", "bf16", "non_ema")


def fetched(name: str, patterns: Sequence[str], variant: str | None = None) -> Path:
    """The path of the local copy of the hub's repository `name`, in the hub's cache; missing files are fetched.

    `patterns`: patterns of the names of files to fetch. Of the variants of weights only `variant` is fetched. The hub's
    own environment variables hold: HF_HOME, HF_TOKEN, HF_HUB_OFFLINE.

    Raises ModelError if there is none: no network, no such model, no right to read it, no room.
    """
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                allow_patterns=list(patterns),
                # Variants are before the ending, or before the number of a shard.
                ignore_patterns=[f"*.{one}{end}" for one in _VARIANTS if one != variant for end in (".*", "-*")],
            )
        )
    except Exception as error:  # also what the hub's HTTP client raises, whose classes change with its versions
        raise ModelError(f"the folder {name} does not exist here, and {_reason(name, error)}") from error


def _reason(name: str, error: Exception) -> str:
    """Words for an error: why the hub gives no copy of the repository `name`, and the remedy."""
    from huggingface_hub import constants, errors

    cause: BaseException = error
    while isinstance(cause, errors.LocalEntryNotFoundError) and cause.__cause__ is not None:  # no copy here, because
        cause = cause.__cause__
    said, cache = _first_line(cause), constants.HF_HUB_CACHE
    login = "log in by hf auth login or set HF_TOKEN"
    match cause:
        case errors.HFValidationError():
            return "no model of the Hugging Face Hub can have this name; give a diffusers folder or a hub id owner/name"
        case errors.GatedRepoError():  # status 401 without a login, else 403
            return (
                f"the Hugging Face Hub gives this model only to those who have accepted its terms ({said})\n"
                f"Accept them at {constants.ENDPOINT}/{name}, then {login}"
            )
        case errors.RepositoryNotFoundError():  # status 404, or 401 without a login: private ones are not admitted
            return (
                f"the Hugging Face Hub shows no model of this name ({said})\n"
                f"Check the spelling; if the model is private, {login}"
            )
        case errors.HfHubHTTPError() if cause.response.status_code in (401, 403):
            return (
                f"the Hugging Face Hub refuses to give this model ({said})\nCheck what your token may read, or {login}"
            )
        case OSError(errno=int(), filename=str()):
            return f"the model cannot be kept in the hub's cache ({said})\nThe cache is {cache}; HF_HOME moves it"
        case errors.OfflineModeIsEnabled():
            why = "HF_HUB_OFFLINE forbids asking the Hugging Face Hub"
        case _:
            why = f"the Hugging Face Hub could not be reached ({said})"
    return (
        f"{why}\n"
        f"Where there is a network, fetch it: hf download {name} --local-dir {name}\n"
        f"A whole copy in the hub's cache is used too; {cache} has none, and HF_HOME names another place"
    )


def _first_line(error: BaseException) -> str:
    """The name of the error's class and the first line of its message, as a text."""
    lines = str(error).strip().splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0][:_LONG]}"
