"""What can go wrong with a checkpoint, by name."""


class CheckpointError(RuntimeError):
    """Any failure of the checkpoint system."""

    contact_lost = False
    """Whether the ranks lost each other, so that others may still be at work on what failed here."""


class CheckpointSaveError(CheckpointError):
    """A save was given up: nothing was committed, earlier checkpoints are untouched."""


class CheckpointLoadError(CheckpointError):
    """A checkpoint exists but cannot be applied to this job."""


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
    """A stored value names a type that is not available in this process."""
