"""A model's config.json from the Hugging Face Hub, with `huggingface_hub` and its cache.

That library honours HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE and HF_HOME, and is imported only here. Only JSON
is fetched: code in a repository is neither fetched nor run.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from wazn.errors import InputError, UnknownFact
from wazn.facts.models import (
    ModelSource,
    config_notes,
    nearest_models,
    read_bounded,
)
from wazn.model.config import LARGEST_FILE_BYTES, parse_config

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["fetch_config"]

_FROM_ELSEWHERE = "give a folder that holds its config.json, or a name that `wazn models` lists: both work offline"


class _TooLargeError(Exception):
    """The server sends more than it announced."""


class _Bound:
    """Stands where the library wants a progress bar: shows nothing, stops an answer that does not end."""

    def __init__(self, *_: object, **options: Any) -> None:
        self._seen = options.get("initial") or 0

    def update(self, num_bytes: int) -> None:
        self._seen += num_bytes
        if self._seen > LARGEST_FILE_BYTES:
            raise _TooLargeError

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> _Bound:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Nothing is open."""


def fetch_config(model_id: str) -> ModelSource:
    """Return the configuration of a model on the Hub, from the library's cache where it is current or the Hub is away.

    Raises:
        UnknownFact: no such repository, with the nearest names of the catalogue.
        InputError: gated, without config.json, larger than `LARGEST_FILE_BYTES`, not JSON, or out of reach.
    """
    _library().logging.set_verbosity_error()
    away = _refuse_early(model_id)
    path = _download(model_id, away)
    shown = f"{model_id}/config.json"
    mapping = parse_config(read_bounded(path), path=shown)
    return ModelSource(
        id=model_id,
        mapping=mapping,
        origin="hub",
        path=shown,
        published_parameters=None if away else _published_parameters(model_id, mapping),
        notes=config_notes(model_id, mapping),
    )


def _library() -> Any:
    """`huggingface_hub.utils`, which names the errors in every release; untyped, because it does not export them.

    The library reads its settings when it is imported, fails on those that it cannot read, and prints about that.

    Raises: InputError for such a setting.
    """
    from contextlib import redirect_stdout

    try:
        with redirect_stdout(sys.stderr):  # stdout is for the answer
            import huggingface_hub.file_download
            import huggingface_hub.utils
    except ValueError as error:
        raise InputError(
            f"a setting of huggingface_hub cannot be read: {str(error)[:200]}",
            hint="look at HF_ENDPOINT and the other HF_ variables of the environment",
        ) from None
    return huggingface_hub.utils


def _refuse_early(model_id: str) -> Exception | None:
    """Ask for the size before the file. Returns why the Hub is out of reach, or None; raises what it answered."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    library = _library()
    try:
        seen = get_hf_file_metadata(
            hf_hub_url(model_id, "config.json"), timeout=constants.HF_HUB_ETAG_TIMEOUT
        )
    except library.HfHubHTTPError as error:
        _explain(model_id, error)
    except Exception as error:  # the transport's own errors: their classes differ by release
        return error
    if seen.size is not None and seen.size > LARGEST_FILE_BYTES:
        raise _too_large(model_id)
    return None


def _download(model_id: str, away: Exception | None) -> str:
    import inspect

    from huggingface_hub import hf_hub_download

    library = _library()
    options: dict[str, Any] = {"local_files_only": away is not None}
    if "tqdm_class" in inspect.signature(hf_hub_download).parameters:
        options["tqdm_class"] = _Bound
    else:
        library.disable_progress_bars()
    try:
        return str(hf_hub_download(model_id, "config.json", **options))
    except _TooLargeError:
        raise _too_large(model_id) from None
    except library.LocalEntryNotFoundError as error:
        raise _out_of_reach(model_id, away or error.__cause__ or error) from None
    except library.HfHubHTTPError as error:
        _explain(model_id, error)
    except Exception as error:  # the transport's own errors: their classes differ by release
        raise _out_of_reach(model_id, error) from None


def _too_large(model_id: str) -> InputError:
    return InputError(
        f"{model_id}: the config.json is larger than {LARGEST_FILE_BYTES:,} bytes",
        hint="a model's config.json has a few kilobytes; is this the right repository?",
    )


def _out_of_reach(model_id: str, reason: BaseException) -> InputError:
    from huggingface_hub import constants

    kind = type(reason).__name__
    if constants.HF_HUB_OFFLINE:
        return InputError(
            f"{model_id} is neither in the catalogue nor in the cache, and HF_HUB_OFFLINE is set",
            hint=f"unset HF_HUB_OFFLINE, or {_FROM_ELSEWHERE}",
        )
    if isinstance(reason, RecursionError) or "Redirect" in kind:
        problem = "sends us round in circles (too many redirects)"
    elif "Timeout" in kind:
        problem = "did not answer in time"
    else:
        said = str(reason).strip().partition("\n")[0][:200]
        problem = f"cannot be reached ({said or kind})"
    return InputError(
        f"{model_id} is not in the catalogue, and {constants.ENDPOINT} {problem}",
        hint=_FROM_ELSEWHERE,
    )


def _explain(model_id: str, error: Any) -> NoReturn:
    """Say in our words what the Hub answered; the order matters, a gated repository is also one that is not found."""
    from huggingface_hub import constants

    library = _library()
    page = f"{constants.ENDPOINT}/{model_id}"
    status = getattr(error.response, "status_code", None)
    refused = error.response.headers.get("X-Error-Message", "")
    if isinstance(error, library.GatedRepoError):
        raise InputError(
            f"{model_id} is gated: the Hub gives it only to those who accepted its conditions",
            hint=f"accept them at {page} and set HF_TOKEN, or {_FROM_ELSEWHERE}",
        ) from None
    if isinstance(error, library.EntryNotFoundError):
        raise InputError(
            f"{model_id} has no config.json",
            hint="if it holds adapters or GGUF files, name the base model instead",
        ) from None
    if "Invalid credentials" in refused:
        raise InputError(
            f"{constants.ENDPOINT} refused the token",
            hint="set HF_TOKEN to a valid token, or unset it for a public model",
        ) from None
    if isinstance(error, library.RepositoryNotFoundError):
        nearest = nearest_models(model_id)
        raise UnknownFact(
            f"no model {model_id} in the catalogue or on {constants.ENDPOINT} (or it is private)",
            nearest=nearest,
            hint=None if nearest else "check the spelling; a private model needs HF_TOKEN",
        ) from None
    raise InputError(
        f"{constants.ENDPOINT} answered {status} for {model_id}/config.json",
        hint=f"try again later, or {_FROM_ELSEWHERE}",
    ) from None


def _published_parameters(model_id: str, mapping: dict[str, Any]) -> int | None:
    """The total that the Hub reads from the headers of the safetensors files: one request for any number of files.

    None where the Hub does not say, and where weights are packed (the header then counts bytes, not parameters).
    """
    if "quantization_config" in mapping:
        return None
    from huggingface_hub import HfApi, constants

    try:
        info = HfApi().model_info(model_id, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        total = info.safetensors.total if info.safetensors is not None else None
    except Exception:  # a cross-check and not needed: the architecture is counted anyway
        return None
    return total if isinstance(total, int) and total > 0 else None
