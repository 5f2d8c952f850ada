"""Results of a replay as plain data."""

import math
from dataclasses import dataclass, field

TOLERANCE = 1e-6
"""Relative difference that another order of summation may cause."""


class ReplayError(ValueError):
    """Request that a run cannot satisfy, such as a step after its end."""


@dataclass(frozen=True)
class SampleLoss:
    """Loss of one sample of a step."""

    position: int
    """Place in the step, from 0."""
    index: int | None
    """Index in the training dataset; None for a stream."""
    rank: int | None
    micro_batch: int | None
    row: int | None
    loss: float | None
    """Mean over the targets of the sample; None if it has no targets, or the model computes one loss for a batch."""
    num_targets: int
    source: str | None = None
    """File and document that the sample begins in, for text data of the program."""


@dataclass(frozen=True)
class TokenLoss:
    """Loss of one target token."""

    position: int
    """Place of its sample in the step."""
    index: int | None
    place: int
    """Place of the token in the sample."""
    token_id: int
    loss: float
    predicted_id: int
    """Token with the largest logit."""
    context: str | None
    """Text before the token; None without a tokenizer."""
    token: str | None
    predicted: str | None


@dataclass(frozen=True)
class ModuleGradient:
    """Gradient norm of the parameters that a module owns itself, before clipping."""

    module: str
    norm: float
    num_nonfinite: int
    """Number of gradient values that are NaN or infinite."""


@dataclass(frozen=True)
class ActivationReport:
    """Extremes of the outputs of a module over all micro-batches of a step; of finite values only."""

    module: str
    minimum: float
    maximum: float
    absolute_maximum: float
    num_nonfinite: int


@dataclass(frozen=True)
class FirstNonFinite:
    """First module with a NaN or infinite value, in the order of the computation."""

    module: str
    micro_batch: int
    rows: tuple[int, ...] = ()
    """Rows of the micro-batch with such values, if the output has one row per sample."""


@dataclass(frozen=True)
class LoggedStep:
    """Log record of the run at a step, and the same record of the replay.

    A record covers the steps since the previous record, so it is comparable only as a whole.
    """

    loss: float | None
    grad_norm: float | None
    replayed_loss: float | None
    replayed_grad_norm: float | None

    @property
    def is_exact(self) -> bool:
        """Whether loss and gradient norm are equal in every bit."""
        pairs = ((self.loss, self.replayed_loss), (self.grad_norm, self.replayed_grad_norm))
        return all(_same(run, replayed) for run, replayed in pairs)

    @property
    def is_close(self) -> bool:
        """Whether both agree to `TOLERANCE`, as a run of several ranks does on one device."""
        return self.difference <= TOLERANCE

    @property
    def difference(self) -> float:
        """The larger relative difference of loss and gradient norm; NaN if either is not finite in only one of both."""
        pairs = ((self.loss, self.replayed_loss), (self.grad_norm, self.replayed_grad_norm))
        return max((_relative(run, replayed) for run, replayed in pairs if not _same(run, replayed)), default=0.0)


@dataclass(frozen=True)
class StepReport:
    """Everything that a replay measured in a step."""

    step: int
    epoch: int
    loss: float | None
    """Mean over the targets of the step; None if the step makes no update (`skip_steps`)."""
    grad_norm: float | None
    """Norm of all gradients, before clipping."""
    learning_rate: float
    num_targets: int
    samples: list[SampleLoss] = field(default_factory=list)
    worst_tokens: list[TokenLoss] = field(default_factory=list)
    gradients: list[ModuleGradient] = field(default_factory=list)
    activations: list[ActivationReport] = field(default_factory=list)
    """In the order of the computation."""
    first_nonfinite: FirstNonFinite | None = None
    first_nonfinite_gradient: FirstNonFinite | None = None
    logged: LoggedStep | None = None
    """None if the run has no log record at this step."""
    gradient_digests: dict[str, str] = field(default_factory=dict)
    """Hash of each gradient by parameter name, only for a comparison of ranks."""

    @property
    def worst_sample(self) -> SampleLoss | None:
        """The sample with the largest loss; NaN is larger than any number."""
        known = [sample for sample in self.samples if sample.loss is not None]
        return max(known, key=lambda sample: badness(sample.loss), default=None)


@dataclass(frozen=True)
class ReplayReport:
    """Result of a replay."""

    run: str
    checkpoint: str | None
    """Checkpoint that the replay started from; None: the beginning of the run."""
    checkpoint_step: int
    trainer: str
    """Kind of the trainer of the run."""
    num_ranks: int
    """Processes of the run."""
    device: str
    is_same_topology: bool
    """Whether the run had one process too, so that the replay is exact in every bit."""
    steps: list[StepReport]
    without: list[int] = field(default_factory=list)
    """Dataset indices that were left out in `steps_without`."""
    steps_without: list[StepReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    repeats_random_numbers: bool = True
    """Whether random numbers of the model, such as dropout masks, were those of the run. False: see `notes`."""


def badness(loss: float | None) -> float:
    """Return a sort key for losses: NaN is worse than infinity, and None is the best."""
    if loss is None:
        return -math.inf
    return math.inf if math.isnan(loss) else min(loss, 1e308)


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


def _relative(one: float | None, other: float | None) -> float:
    if one is None or other is None or not (math.isfinite(one) and math.isfinite(other)):
        return math.nan
    return abs(one - other) / max(abs(one), abs(other))
