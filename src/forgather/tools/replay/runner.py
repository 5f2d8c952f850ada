"""Replay of steps of a run: from the nearest earlier checkpoint, on one device, in a temporary output directory.

`replay_run` rebuilds a run of `forgather train` from its stored configuration. `replay` is for runs from Python: it takes
the arguments of the run and the keyword arguments of its trainer. Neither writes into the directory of the run, takes its
lock, or calls its callbacks, so the run may train meanwhile.
"""

import dataclasses
import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from forgather.ml.checkpoint.weights.trial_build import require_plausible_model
from forgather.ml.distributed import StaticDistributedEnvironment
from forgather.ml.distributed.environment import get_local_rank
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments, arguments_from
from forgather.ml.trainer.loading.builders import kind_of
from forgather.ml.trainer.pipeline.pipeline_model import pretrained_without_weights
from forgather.ml.trainer.samples.skipped import SKIP_SAMPLES, SKIP_STEPS
from forgather.tools.replay.random_states import RankGenerators
from forgather.tools.replay.replay_trainer import ReplayTrainer
from forgather.tools.replay.report import ReplayError, ReplayReport, StepReport
from forgather.tools.replay.run_log import RunLog
from forgather.tools.run_files import RunFiles, num_data_parallel, open_run, state_of, state_of_ranks, step_of
from forgather.tools.samples.run_order import build_training_data, scratch_directory
from forgather.tools.samples.step_order import Anchor, StepOrder, StepSample

if TYPE_CHECKING:
    from forgather.config.schema import Configuration, ModelSection

logger = logging.getLogger(__name__)

_SECTIONS = ("model", "tokenizer", "data", "loss", "optimizer")
_KINDS = {
    "Trainer": "single",
    "DDPTrainer": "ddp",
    "FSDP2Trainer": "fsdp2",
    "AccelTrainer": "accelerate",
    "PipelineTrainer": "pipeline",
    "HybridTrainer": "hybrid",
}
_CHANGES: dict[str, Any] = {
    "save_strategy": "no",
    "eval_strategy": "no",
    "eval_on_save": False,
    "eval_on_start": False,
    "load_best_model_at_end": False,
    "preserve_best_model": False,
    "report_to": [],
    "disable_tqdm": True,
    "logging_dir": None,
    "async_save": False,
    "checkpoint_layout": "checkpoints",
    "health_check": False,
    "replica_check_steps": 0,
    "control_socket": False,
    # The update has to wait until the gradients were measured.
    "fuse_optim_with_backward": False,
}
"""Values of arguments that a replay changes: it neither saves, evaluates nor reports."""


def replay_run(
    path: str,
    step: int,
    to: int | None = None,
    *,
    without: Sequence[int] = (),
    config: str | None = None,
    keeps_digests: bool = False,
) -> ReplayReport:
    """Replay a step, or the steps `step` to `to`, of a run of `forgather train`.

    `path` is the output directory, or a checkpoint to start from. `without` are dataset indices: the steps are replayed a
    second time without these samples. A stored configuration may not name code to run, unless `config` is its path.
    `keeps_digests` adds a hash of each gradient to the reports, to compare devices.
    """
    run = open_run(path)
    configuration, folder = run.configuration(step, config)
    if config is None:
        from forgather.config.stored import config_option, refuse_code

        refuse_code(configuration, *_SECTIONS, remedy=config_option(folder))
    with scratch_directory(run.output_dir) as scratch:
        parts = _parts_of(configuration, scratch, folder if config is None else None)
        made = _Replayer(run, configuration.trainer.kind, configuration.args, parts, scratch, keeps_digests)
        return made.report(step, step if to is None else to, without)


def replay(
    path: str,
    step: int,
    to: int | None = None,
    *,
    args: TrainingArguments | Mapping[str, Any],
    without: Sequence[int] = (),
    trainer: str | None = None,
    keeps_digests: bool = False,
    **parts: Any,
) -> ReplayReport:
    """Replay steps of a run that was started from Python.

    `args` and `parts` are the arguments of the run's trainer: `model_init`, `train_dataset`, `processing_class`,
    `compute_loss_func` and so on; callbacks are not called. `trainer` is the kind of the trainer, such as "ddp", if its
    class is a subclass with another name. The other arguments are as in `replay_run`.
    """
    run = open_run(path)
    described = run.describing(step)
    name = None if described is None else described.manifest.trainer_class
    kind = trainer or _KINDS.get(
        name or "", "single" if described is None or described.manifest.world_size == 1 else ""
    )
    if not kind:
        raise ReplayError(
            f"The run was trained by {name}, which is no trainer of Forgather. Pass trainer= with the kind of its base class: "
            f"{', '.join(sorted(_KINDS.values()))}."
        )
    ignored = {"callbacks", "default_callbacks", "distributed_env", "eval_dataset", "accelerator"}
    with scratch_directory(run.output_dir) as scratch:
        kept = {name: value for name, value in parts.items() if name not in ignored}
        own = arguments_from(TrainingArguments, args)
        made = _Replayer(run, kind, own, kept, scratch, keeps_digests)
        return made.report(step, step if to is None else to, without)


class _Replayer:
    """Replays of one run, with its arguments and the keyword arguments of its trainer."""

    def __init__(
        self,
        run: RunFiles,
        kind: str,
        args: TrainingArguments,
        parts: Mapping[str, Any],
        scratch: str,
        keeps_digests: bool,
    ) -> None:
        self._run = run
        self._kind = kind
        self._args = args
        self._parts = parts
        self._scratch = scratch
        self._keeps_digests = keeps_digests

    def report(self, first: int, last: int, without: Sequence[int]) -> ReplayReport:
        if not 1 <= first <= last:
            raise ReplayError(
                f"steps {first} to {last}: steps are counted from 1, and the last must not precede the first."
            )
        start, described = self._run.before(first), self._run.describing(first)
        manifest = None if described is None else described.manifest
        self._num_ranks = num_data_parallel(self._kind, manifest)
        self._order = self._order_of(first)
        self._require_in_steps(without, first, last)
        trainer = self._replayed(first, last, ())
        steps = self._with_log(trainer, first, last)
        again = self._replayed(first, last, without).reports if without else []
        world_size = 1 if manifest is None else manifest.world_size
        return ReplayReport(
            run=self._run.output_dir,
            checkpoint=None if start is None else start.path,
            checkpoint_step=0 if start is None else step_of(start),
            trainer=self._kind,
            num_ranks=world_size,
            device=str(trainer.device),
            is_same_topology=world_size == 1,
            repeats_random_numbers=not self._draws_by_stage(trainer),
            steps=steps,
            without=sorted(set(without)),
            steps_without=again,
            notes=self._notes(steps, world_size, trainer, drifts=last - 1 > (0 if start is None else step_of(start))),
        )

    def _replayed(self, first: int, last: int, without: Sequence[int]) -> ReplayTrainer:
        """Train from the checkpoint to the last step, and return the trainer with its reports."""
        start = self._run.before(first)
        args = self._arguments(first, without)
        trainer = ReplayTrainer(
            args=args,
            first=first,
            last=last,
            samples_of=lambda step: self._samples(step, without),
            generators=self._generators(first),
            num_ranks=self._num_ranks,
            position=self._position_of_ranks(first),
            keeps_digests=self._keeps_digests,
            distributed_env=StaticDistributedEnvironment(local_rank=get_local_rank()),
            **self._parts,
        )
        trainer.train(resume_from_checkpoint=False if start is None else start.path)
        reached = trainer.state.global_step
        if reached < last:
            raise ReplayError(
                f"The run ends at step {reached}, before step {last}: its arguments set max_steps={self._args.max_steps} and "
                f"num_train_epochs={self._args.num_train_epochs}."
            )
        return trainer

    def _arguments(self, first: int, without: Sequence[int]) -> TrainingArguments:
        known = {field.name for field in dataclasses.fields(TrainingArguments)}
        values = {name: value for name, value in self._args.to_dict().items() if name in known}
        start, args = self._run.before(first), self._args
        changes = {**_CHANGES, "output_dir": self._scratch, **self._skipped(first, without)}
        changes["watch"] = {"enabled": False}
        changes["nonfinite_grad"] = "skip" if args.nonfinite_grad == "skip" else "ignore"
        # One device trains on the micro-batches of all data-parallel ranks, in their order.
        changes["gradient_accumulation_steps"] = (
            args.gradient_accumulation_steps * self._num_ranks if args.global_batch_size is None else 1
        )
        if start is None:
            changes["seed"] = self._first_seed(first)
        if self._position_of_ranks(first) is not None:
            changes["skip_checkpoint_components"] = [*args.skip_checkpoint_components, "dataset"]
        changes["device"] = None if args.use_cpu else _present_device(args.device)
        return arguments_from(TrainingArguments, values | changes)

    def _skipped(self, first: int, without: Sequence[int]) -> dict[str, list[int]]:
        """Return the samples and steps that the run left out, as its checkpoints recorded, and `without`."""
        described = self._run.describing(first)
        state = {} if described is None else state_of(described, "trainer")
        samples = state.get(SKIP_SAMPLES) or self._args.skip_samples
        steps = state.get(SKIP_STEPS) or self._args.skip_steps
        return {SKIP_SAMPLES: sorted({*samples, *without}), SKIP_STEPS: list(steps)}

    def _first_seed(self, first: int) -> int:
        """Return the seed that the run began with; a checkpoint knows a seed that was drawn."""
        described = self._run.describing(first)
        position = None if described is None else state_of(described, "dataset")
        seed = position.get("seed") if isinstance(position, Mapping) else None
        seed = self._args.seed if type(seed) is not int else seed
        if seed < 0:
            raise ReplayError(
                f"The run has no checkpoint before step {first}, and its seed is unknown (seed={self._args.seed} draws a new "
                "one), so it cannot be replayed from its beginning. Save a checkpoint earlier, or set seed."
            )
        return int(seed)

    def _generators(self, first: int) -> RankGenerators:
        if not self._draws_by_rank:
            return RankGenerators()
        start = self._run.before(first)
        if start is None:
            return RankGenerators.seeded(self._first_seed(first), self._num_ranks)
        return RankGenerators(state_of_ranks(start, "rng"))

    def _position_of_ranks(self, first: int) -> Mapping[str, Any] | None:
        """Return the position in the data that all ranks share, if each saved its own; else None."""
        start = self._run.before(first)
        states = [] if start is None else state_of_ranks(start, "dataset")
        if len(states) < 2 or self._order is None:
            return None
        if any(state != states[0] for state in states):
            raise ReplayError(
                "The ranks of the run had datasets of their own, which one device cannot replay: their positions differ."
            )
        position: Mapping[str, Any] = states[0]
        return position

    @property
    def _draws_by_rank(self) -> bool:
        """Whether the micro-batches of this device are those of the ranks, so that they can use their random numbers."""
        return self._kind in ("ddp", "fsdp2", "accelerate") and self._num_ranks > 1

    # --- samples

    def _order_of(self, first: int) -> StepOrder | None:
        """Return the order of the samples, without skipped ones; None for a stream."""
        dataset = self._parts.get("train_dataset")
        if kind_of(dataset) != "map":
            return None
        start, args = self._run.before(first), self._args
        if start is None:
            return StepOrder.of(args, dataset, num_ranks=self._num_ranks, seed=self._first_seed(first))
        position = state_of(start, "dataset")
        order = StepOrder.of(args, dataset, num_ranks=self._num_ranks, seed=position["seed"])
        return order.continued(Anchor(step_of(start), position["epoch"], position["index"]), position)

    def _samples(self, step: int, without: Sequence[int]) -> list[StepSample] | None:
        if self._order is None:
            return None
        left_out = {*self._skipped(step, without)[SKIP_SAMPLES]}
        return [dataclasses.replace(one, is_skipped=one.index in left_out) for one in self._order.samples(step)]

    def _require_in_steps(self, without: Sequence[int], first: int, last: int) -> None:
        if not without:
            return
        if self._order is None:
            raise ReplayError("Samples of a stream have no index, so they cannot be left out.")
        present = {one.index for step in range(first, last + 1) for one in self._order.samples(step)}
        missing = sorted(set(without) - present)
        if missing:
            where = f"step {first} has" if first == last else f"steps {first} to {last} have"
            shown = ", ".join(map(str, sorted(present)[:20])) + (", ..." if len(present) > 20 else "")
            raise ReplayError(f"{where} no sample with the dataset index {missing[0]}. The indices are {shown}.")

    # --- comparison with the run

    def _with_log(self, trainer: ReplayTrainer, first: int, last: int) -> list[StepReport]:
        log = RunLog(self._run)
        replayed = {record["step"]: record for record in trainer.state.log_history if "grad_norm" in record}
        reports = {report.step: report for report in trainer.reports}
        rate, epoch = float(trainer.lr_scheduler.get_last_lr()[0]), trainer.state.raw_epoch
        steps = []
        for step in range(first, last + 1):
            report = reports.get(step) or StepReport(step, epoch, None, None, rate, 0)
            steps.append(dataclasses.replace(report, logged=log.compared(step, replayed.get(step))))
        return steps

    def _notes(self, steps: Sequence[StepReport], world_size: int, trainer: ReplayTrainer, drifts: bool) -> list[str]:
        """Return remarks for people; `drifts` says that parameters were updated before the last replayed step."""
        notes = []
        if any(report.loss is None for report in steps):
            notes.append(
                "Steps without a loss make no update: skip_steps or skip_samples leaves out all of their samples."
            )
        if self._args.torch_compile:
            notes.append("The model is compiled: activations are measured outside of compiled parts only.")
        known = [report.logged for report in steps if report.logged is not None]
        if self._draws_by_stage(trainer):
            notes.append(_pipeline_note(self._kind, drifts))
        elif any(not (one.is_exact if world_size == 1 else one.is_close) for one in known):
            notes.append(
                "The replay differs from the log of the run. Possible reasons: other data, code or versions than in the run, "
                f"another device (this replay used {trainer.device}), operations that are not deterministic, or callbacks of "
                "the run that changed the training."
            )
        return notes

    def _draws_by_stage(self, trainer: ReplayTrainer) -> bool:
        """Return whether stages of a pipeline drew random numbers, in an order that one device cannot repeat."""
        return self._kind in ("pipeline", "hybrid") and trainer.draws_random_numbers


def _pipeline_note(kind: str, drifts: bool) -> str:
    """Return the exact and the inexact parts of a replay of a pipeline with dropout."""
    told = (
        f"The model draws random numbers (dropout), and each stage of a {kind} run draws its own: one device cannot repeat "
        "them. Exact: the samples and their order, the learning rate, and the weights of the checkpoint. Not exact: the "
        "dropout masks, so losses, norms and activations are those of another draw, and differ from the log of the run."
    )
    if drifts:
        told += (
            " The updates since the checkpoint used other masks too, so the weights drift from those of the run; a checkpoint "
            "just before the step avoids this."
        )
    return told + (
        " For the bits of the run, resume the checkpoint with the same trainer and number of ranks, in another "
        "args.output_dir."
    )


def _parts_of(configuration: "Configuration", scratch: str, stored_in: str | None) -> dict[str, Any]:
    """Return the keyword arguments of the trainer, built as `forgather train` does, without callbacks.

    `stored_in` is the directory of a configuration that the user has not named.
    """
    from forgather.config import builders, class_paths, model_builders

    tokenizer = builders.build_tokenizer(configuration.tokenizer)
    if stored_in is not None:
        _require_plausible_model(configuration.model, tokenizer, stored_in)
    return {
        "model_init": model_builders.model_builder(configuration.model, tokenizer),
        "optimizer_factory": class_paths.partial(configuration.optimizer, "optimizer"),
        "lr_scheduler_factory": class_paths.partial(configuration.lr_scheduler, "lr_scheduler"),
        "optimizer_groups": builders.build_optimizer_groups(configuration.optimizer_groups),
        **builders.build_loss(configuration.loss),
        "train_dataset": build_training_data(configuration, scratch),
        "processing_class": tokenizer,
    }


def _require_plausible_model(section: "ModelSection", tokenizer: Any, folder: str) -> None:
    """Raise CheckpointLoadError if the model of a stored configuration cannot belong to the weights beside it."""
    from forgather.config import model_builders
    from forgather.config.yaml_reader import CONFIG_NAME

    def build() -> nn.Module:
        with pretrained_without_weights():
            return model_builders.model_builder(section, tokenizer)()

    require_plausible_model(build, os.path.join(folder, CONFIG_NAME), folder, {"model": dataclasses.asdict(section)})


def _present_device(asked: str | None) -> str | None:
    """Return the type of the run's device if this machine has it; None lets the trainer choose."""
    import torch

    if asked is None:
        return None
    kind = torch.device(asked).type
    present = {"cpu"} | ({str(torch.accelerator.current_accelerator())} if torch.accelerator.is_available() else set())
    if kind in present:
        # Without the index: the process of another rank uses another device of this type.
        return kind
    logger.warning("The run used %s, which this machine does not have.", asked)
    return None
