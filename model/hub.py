"""Where a model's files are: a folder as given, or a snapshot fetched from the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from antiphon.protocol.errors import CheckpointError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WANTED = ["config.json", "generation_config.json", "model.safetensors.index.json", "*.safetensors"]
_UNWANTED = ["original/*", "metal/*"]
"""The same weights again, in OpenAI's layout and in Metal's."""


def fetch(model_path: str, revision: str | None = None, token: str | None = None) -> Path:
    """The folder that holds a checkpoint, downloaded first if ``model_path`` is a hub id.

    Args:
        model_path: a folder, or a hub id such as ``openai/gpt-oss-20b``.
        revision: branch, tag or commit of a hub id; the main branch when absent.
        token: hub access token; the one of the environment or of a hub login when absent.

    Returns:
        the folder; of a hub id, inside the hub's own cache, where a complete snapshot is reused (also without
        a network).

    Raises:
        CheckpointError: no such folder or repository or revision, no access, no network. One line.
    """
    folder = Path(model_path).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise CheckpointError(f"{model_path}: is a folder; a revision ({revision}) is of hub ids only")
        return folder
    if folder.exists():
        raise CheckpointError(f"{model_path}: is a file; expected a folder with config.json")
    if not _HUB_ID.fullmatch(model_path):
        raise CheckpointError(f"{model_path}: no such folder, and not a hub id (owner/name)")
    return _download(model_path, revision, token)


def _download(repo_id: str, revision: str | None, token: str | None) -> Path:
    # Imported here: a folder needs none of it, and it takes a while.
    import huggingface_hub
    from huggingface_hub import errors

    at = f"{repo_id}@{revision}" if revision else repo_id
    try:
        snapshot = huggingface_hub.snapshot_download(
            repo_id, revision=revision, token=token, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{at}: access is restricted; accept its terms on the hub and give a token (HF_TOKEN)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{at}: no such folder here and no such repository on the hub (or a private one: give a token)"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{at}: the repository has no such revision") from error
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{at}: no such folder here, not in the local hub cache, and the hub cannot be reached"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise CheckpointError(f"{at}: cannot be fetched: {' '.join(str(error).split())}") from error
    return Path(str(snapshot))
