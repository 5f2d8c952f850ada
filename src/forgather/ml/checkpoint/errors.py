"""What can go wrong with a checkpoint, by name."""

import contextlib
import traceback
from collections.abc import Iterator


class CheckpointError(RuntimeError):
    """Any failure of the checkpoint system."""

    contact_lost = False
    """Whether the ranks lost each other, so that others may still be at work on what failed here."""

    is_misfit = False
    """Whether the checkpoint is intact but does not fit this job: auto-resume stops instead of taking an older one."""


class CheckpointSaveError(CheckpointError):
    """A save was given up: nothing was committed, earlier checkpoints are untouched."""


class CheckpointLoadError(CheckpointError):
    """A checkpoint exists but cannot be applied to this job."""

    @classmethod
    def misfit(cls, message: str) -> "CheckpointLoadError":
        """The error for an intact checkpoint that does not fit this job."""
        error = cls(message)
        error.is_misfit = True
        return error


class CheckpointCorruptError(CheckpointLoadError):
    """A file of the checkpoint is missing or does not hold the bytes that were written."""


class CheckpointNotFoundError(CheckpointLoadError):
    """There is no checkpoint at the path."""


class CheckpointVersionError(CheckpointLoadError):
    """The checkpoint was written by a newer format than this version reads."""


class ReplicationError(CheckpointError):
    """State that is declared identical across ranks is not."""


class OutputDirLockedError(CheckpointError):
    """Another running job owns the output directory."""


class StateEncodingError(TypeError):
    """A state holds a value that cannot be stored without pickling code."""


class StateDecodingError(CheckpointLoadError):
    """A state file holds something that no save of ours writes; nothing of it was used."""


class UnregisteredClassError(StateDecodingError):
    """A stored value belongs to a class that `register_state_class` has not been told about in this process."""

    is_misfit = True


def release_locals(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold: whoever keeps the error would keep all that was read."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextlib.contextmanager
def naming(*paths: str) -> Iterator[None]:
    """Put the names of files in front of checkpoint errors about their content."""
    try:
        yield
    except CheckpointError as error:
        if any(path in str(error) for path in paths):
            raise
        named = type(error)(f"{', '.join(paths)}: {error}")
        named.is_misfit = error.is_misfit
        raise named from error
