"""A model that the hub does not give is one error with its reason and its remedy."""

from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from diffusionpipe.errors import ModelError
from diffusionpipe.models.opening.folder import resolve_folder


class _ConnectError(Exception):
    """What the hub's HTTP client raises is no OSError."""


def _answer(kind, status):
    return kind(
        f"{status} Client Error. (Request ID: abc)\n\nMuch more.",
        response=SimpleNamespace(headers={}, status_code=status, request=None),
    )


def _no_copy(cause):
    found = errors.LocalEntryNotFoundError("An error happened while trying to locate the files on the Hub")
    found.__cause__ = cause
    return found


FETCHED = r"fetch it: hf download owner/model --local-dir owner/model\n.*in the hub's cache.*HF_HOME"
LOGIN = "hf auth login or set HF_TOKEN"
ANSWERS = {
    "no network": (_no_copy(_ConnectError("no such host")), rf"reached \(_ConnectError: no such host\)\n.*{FETCHED}"),
    "network lost": (_ConnectError("reset\nby peer"), rf"could not be reached \(_ConnectError: reset\)\n.*{FETCHED}"),
    "timeout": (_no_copy(TimeoutError("timed out")), rf"could not be reached \(TimeoutError: timed out\)\n.*{FETCHED}"),
    "no part": (errors.LocalEntryNotFoundError("no copy"), rf"could not be reached \(.*no copy\)\n.*{FETCHED}"),
    "server": (_no_copy(_answer(errors.HfHubHTTPError, 503)), rf"reached \(HfHubHTTPError: 503 .*\)\n.*{FETCHED}"),
    "offline": (_no_copy(errors.OfflineModeIsEnabled("off")), rf"HF_HUB_OFFLINE forbids asking .*\n.*{FETCHED}"),
    "gated": (_answer(errors.GatedRepoError, 401), rf"accepted its terms \(.*401.*\)\n.*/owner/model, then.*{LOGIN}"),
    "gated for this one": (_answer(errors.GatedRepoError, 403), "who have accepted its terms .*403"),
    "bad token": (_answer(errors.HfHubHTTPError, 403), rf"refuses to give this model .*403.*\n.*your token.*{LOGIN}"),
    "unknown": (_answer(errors.RepositoryNotFoundError, 404), rf"no model of this name .*404.*\n.*spelling.*{LOGIN}"),
    "unknown or private": (_answer(errors.RepositoryNotFoundError, 401), "shows no model of this name"),
    "full": (OSError(28, "No space left on device", "/cache/blob"), r"kept in the hub's cache .*left.*\n.*HF_HOME"),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_what_the_hub_answers_is_an_error_with_its_remedy(answer, monkeypatch):
    raised, message = ANSWERS[answer]

    def fail(*_, **__):
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=rf"^the folder owner/model does not exist here, and .*{message}") as caught:
        resolve_folder("owner/model")
    assert len(str(caught.value).splitlines()) <= 3


@pytest.mark.parametrize("name", ["owner/a--b", "owner/a..b", "owner/a.git"])
def test_a_name_that_no_model_of_the_hub_has_is_refused(name):
    with pytest.raises(
        ModelError, match="no model of the Hugging Face Hub can have this name; give a diffusers folder"
    ):
        resolve_folder(name)
