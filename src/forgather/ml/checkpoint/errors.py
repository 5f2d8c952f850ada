"""Exceptions of the checkpoint system, and helpers that name files in errors and free the memory that errors hold.

All modules of `forgather.ml.checkpoint` raise them. `is_misfit` separates a wrong job from a damaged checkpoint: only
damage makes auto-resume fall back to an older checkpoint.
"""

import contextlib
import traceback
from collections.abc import Iterator


class CheckpointError(RuntimeError):
    """Base class of the errors of the checkpoint system."""

    contact_lost = False
    """Whether communication between ranks failed. Other ranks may still be writing, so their files must stay."""

    is_misfit = False
    """Whether the checkpoint is intact but does not fit this job. Auto-resume then stops instead of taking an older
    checkpoint."""


class CheckpointSaveError(CheckpointError):
    """Failed save: nothing was committed, earlier checkpoints are untouched."""


class CheckpointLoadError(CheckpointError):
    """Checkpoint that exists but cannot be applied to this job."""

    @classmethod
    def misfit(cls, message: str) -> "CheckpointLoadError":
        """Return the error for an intact checkpoint that does not fit this job."""
        error = cls(message)
        error.is_misfit = True
        return error


class CheckpointCorruptError(CheckpointLoadError):
    """Checkpoint file that is missing or differs from the bytes that were written."""


class CheckpointNotFoundError(CheckpointLoadError):
    """Path without a checkpoint."""


class CheckpointVersionError(CheckpointLoadError):
    """Checkpoint in a newer format than this version reads."""


class ReplicationError(CheckpointError):
    """State that is declared identical across ranks but differs between them."""


class OutputDirLockedError(CheckpointError):
    """Output directory that another running job has locked."""


class StateEncodingError(TypeError):
    """State with a value that cannot be stored without pickling code."""


class StateDecodingError(CheckpointLoadError):
    """State file with content that Forgather never writes; none of it was used."""


class UnregisteredClassError(StateDecodingError):
    """Stored value of a class that was not registered with `register_state_class` in this process."""

    # The file is intact. The user has to register the class; an older checkpoint would only lose training.
    is_misfit = True


def release_locals(error: BaseException | None) -> None:
    """Clear the local variables in the traceback of an error and of its causes.

    The frames refer to everything that was read, so keeping the error would keep those tensors in memory.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def naming(*paths: str) -> Iterator[None]:
    """Prefix checkpoint errors with the paths of the files, unless the message names one of them already."""
    try:
        yield
    except CheckpointError as error:
        if any(path in str(error) for path in paths):
            raise
        named = type(error)(f"{', '.join(paths)}: {error}")
        named.is_misfit = error.is_misfit
        raise named from error
