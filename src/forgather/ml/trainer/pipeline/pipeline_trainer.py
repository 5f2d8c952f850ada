"""PipelineTrainer: pipeline parallelism with torch.distributed.pipelining.

Each rank holds some stages of the model, and all ranks get the same batches.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.pipelining import ScheduleGPipe

from forgather.ml.checkpoint.components import SharingPattern
from forgather.ml.distributed.watch import REDUCE, note
from forgather.ml.loss import CausalLoss
from forgather.ml.trainer.loop.gradients import GradientNorm
from forgather.ml.trainer.loop.window import samples_in
from forgather.ml.trainer.metrics.named_datasets import first_dataset
from forgather.ml.trainer.pipeline import pipeline_requirements as requirements
from forgather.ml.trainer.pipeline.generation import GenerationOptions, generate
from forgather.ml.trainer.pipeline.model_splitter import ModelSplitter, Split
from forgather.ml.trainer.pipeline.pipeline_arguments import PipelineTrainingArguments
from forgather.ml.trainer.pipeline.pipeline_batches import require_labels
from forgather.ml.trainer.pipeline.pipeline_model import (
    PipelineModel,
    StageFact,
    fill_missing_buffers,
    model_without_memory,
    whole_model,
)
from forgather.ml.trainer.pipeline.pipeline_ranks import PipelineRanks
from forgather.ml.trainer.pipeline.schedules import PipelineSchedulerT, ScheduleChoice
from forgather.ml.trainer.pipeline.schedules.slot_recorder import SlotRecorder, measured_step
from forgather.ml.trainer.pipeline.schedules.timeline import planned_step
from forgather.ml.trainer.pipeline.schedules.trained_stage import StageReducer
from forgather.ml.trainer.pipeline.splitters.causal_lm import create_causal_lm_splitter
from forgather.ml.trainer.pipeline.splitters.example_batch import Example, example_batch
from forgather.ml.trainer.pipeline.stage_loss import StageLoss
from forgather.ml.trainer.pipeline.stage_runner import StageRunner
from forgather.ml.trainer.pipeline.stage_setup import StageSetup
from forgather.ml.trainer.pipeline.tied_weights import norm_of_group
from forgather.ml.trainer.ranks.parallel_loading import DataLayout
from forgather.ml.trainer.recipes.param_precision import with_param_precision
from forgather.ml.trainer.setup import preparation
from forgather.ml.trainer.setup.declared_state import GLOBAL, PER_RANK, REPLICATED, Shared
from forgather.ml.trainer.setup.given_objects import explains_calls
from forgather.ml.trainer.setup.hook_checks import is_overridden
from forgather.ml.trainer.setup.rank_settings import described
from forgather.ml.trainer.setup.torch_settings import torch_settings
from forgather.ml.trainer.step_loss.fused import HiddenStatesModel, unfused
from forgather.ml.trainer.step_loss.model_loss import ModelLoss
from forgather.ml.trainer.step_loss.token_weighting import StepLoss
from forgather.ml.trainer.step_loss.training_loss import TrainingLoss
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.utils import flops_per_token

__all__ = ["PipelineSchedulerT", "PipelineTrainer", "PipelineTrainingArguments"]

TPipelineArgs = TypeVar("TPipelineArgs", bound=PipelineTrainingArguments)


class PipelineTrainer(Trainer[TPipelineArgs]):
    """Trainer for pipeline parallelism: each rank holds some stages of the model, and all train on the same batches.

    A pipeline trains exactly like one device with the same batches. Pass the model as `model_init`, because no rank keeps
    all of it: `self.model` is the full model on the meta device, and `unwrapped_model()` is the part of this rank.

    Args:
        model_splitter: divides the model into stages; the default is for causal language models.
        pipe_schedule_factory: a schedule of torch.distributed.pipelining, or its name.
    """

    arguments_class = PipelineTrainingArguments
    handles_ranks = True
    trains_adapters = False
    unrepeatable = "its stages exchange activations inside a step, so one rank cannot repeat it alone"
    uncalled_hooks: ClassVar[Mapping[str, str]] = {
        "_backward": "torch's schedule runs the backward passes of all micro-batches. Pass compute_loss_func to change the "
        "loss, or override _clip_grad_norm to change gradients."
    }
    state_sharing: ClassVar[Mapping[str, Shared]] = {
        "model": PER_RANK,
        "optimizer": PER_RANK,
        "scheduler": REPLICATED,
        "ema": PER_RANK,
        "trainer": REPLICATED,
        "dataset": GLOBAL,
        "rng": PER_RANK,
    }
    mesh: DeviceMesh | None = None
    pp_group: ProcessGroup | None = None
    pipeline: PipelineModel
    """The stages; set by `_prepare_model`. The `StageFact` attributes read from it."""
    n_pipeline_stages = StageFact(lambda pipeline: pipeline.num_stages)
    pipeline_modules = StageFact(lambda pipeline: list(pipeline.own.values()))
    sharing_metadata = StageFact(lambda pipeline: pipeline.sharing)
    shard_index = StageFact(lambda pipeline: pipeline.shard_index)
    stage_indices = StageFact(lambda pipeline: tuple(pipeline.own))
    pp_has_first_stage = StageFact(lambda pipeline: pipeline.has_first)
    pp_has_last_stage = StageFact(lambda pipeline: pipeline.has_last)
    pp_last_stage_rank = StageFact(lambda pipeline: pipeline.stage_ranks[-1])
    """Rank in `pp_group` that holds the last stage."""
    attention_mask_creator = StageFact(lambda pipeline: pipeline.make_mask)
    runner: StageRunner
    _ranks: PipelineRanks | None = None

    @explains_calls
    def __init__(
        self,
        *,
        args: TPipelineArgs | Mapping[str, Any],
        model_splitter: ModelSplitter | None = None,
        pipe_schedule_factory: Any = ScheduleGPipe,
        **trainer_kwargs: Any,
    ) -> None:
        super().__init__(args=args, **trainer_kwargs)
        self.model_splitter: ModelSplitter = model_splitter or create_causal_lm_splitter()
        self.pipe_schedule_factory = pipe_schedule_factory
        self._schedule = ScheduleChoice.of(pipe_schedule_factory)
        ready = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.lr_scheduler}
        requirements.require_builders(type(self).__name__, ready)
        requirements.require_schedule(self.args, self._schedule)
        requirements.require_two_ranks(type(self).__name__, self.distributed_env)

    # --- ranks and batches

    def _init_distributed(self) -> None:
        super()._init_distributed()
        self._init_mesh()

    def _follow_ranks(self) -> None:
        self._init_mesh()
        args = self.args
        self._schedule.prepare(self.ranks.size, args.stages_per_rank, args.n_microbatches, args.debug_pipeline)

    def _init_mesh(self) -> None:
        """Set `mesh` and the process groups."""
        if self.mesh is None:
            shape, names = (self.dist.world_size,), ("pipeline_parallel",)
            self.mesh = self.team.mesh(self.dist.device_type, shape, names)
        assert self.mesh is not None
        self.pp_group = self.mesh.get_group("pipeline_parallel")

    @property
    def ranks(self) -> PipelineRanks:
        """Position of this rank in its pipeline, and the pipelines of the job."""
        if self._ranks is None:
            self._ranks = self._find_ranks()
        return self._ranks

    def _find_ranks(self) -> PipelineRanks:
        assert self.pp_group is not None
        return PipelineRanks(self.pp_group, [range(self.dist.world_size)])

    def get_process_groups(self) -> dict[str, ProcessGroup]:
        return {} if self.pp_group is None else {"pp_group": self.pp_group}

    def _common_settings(self) -> dict[str, str]:
        generating = [type(one).__qualname__ for one in self.callbacks if getattr(one, "needs_all_ranks", False)]
        return {
            **super()._common_settings(),
            "schedule": self._schedule.traits.name,
            "model_splitter": described(self.model_splitter),
            # Generation is collective, so a callback that generates must exist on every rank.
            "callbacks that need all ranks": described(generating),
        }

    def _is_pipeline_parallel(self) -> bool:
        return True

    def _is_model_parallel(self) -> bool:
        return True

    def _dispatches(self, for_training: bool) -> bool:
        return True

    def _data_layout(self, for_training: bool) -> DataLayout:
        everyone = range(self.dist.world_size)
        return DataLayout(speaks=self.ranks.rank == 0, readers=[everyone], reads_whole=True, mesh=self.mesh)

    # --- the model

    def _prepare_model(self) -> None:
        """Build, split and fill the model, unless an earlier call did; a fresh start builds it again."""
        if self.model is None or self.starts_over:
            # Free the old model first: two models at once may not fit into memory.
            self.model = None
            for name in ("pipeline", "runner"):
                vars(self).pop(name, None)
            self._build_pipeline()
        # Drop wrappers of an earlier run. Compilation and the fused loss are applied again.
        self.pipeline.running = dict(self.pipeline.own)

    def _build_pipeline(self) -> None:
        given, collator = self.given.loss_fn, self.columns.collator()
        check = requirements.OwnLossCheck(given, self._sampled_dataset, collator, self.amp_context)
        setup = StageSetup(self.args, self._split, self._schedule, self.team, self.ranks, self.device, check)
        self.pipeline = setup.divide(self._construct_model)
        if self.loads_weights:
            setup.prepare_to_load(self.pipeline, self._initialize_non_persistent_buffers)
        else:
            setup.fill(self.pipeline, self._construct_model)
        setup.apply_recipes(self.pipeline, self.enable_activation_checkpoint_fn)
        self._shard_stages(self.pipeline)
        self._tied = setup.tie(self.pipeline)
        self.model = self.pipeline.whole

    def _shard_stages(self, pipeline: PipelineModel) -> None:
        """Divide the parameters of this rank's stages over other ranks; a single pipeline does not."""

    def _gathered(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for forward passes. The stages hold their full parameters in it; all ranks enter it together."""
        return contextlib.nullcontext()

    def _construct_model(self, device: torch.device) -> nn.Module:
        """Build the full model: without values on the meta device, otherwise with its initial values."""
        assert self.model_init is not None
        if device.type == "meta":
            model = model_without_memory(self.model_init, self.args.default_dtype)
        else:
            model = whole_model(self.model_init, device, self.args.construct_model_on, self.args.default_dtype)
        return with_param_precision(model, self.args.param_precision)

    def _get_example(self, dataloader: Any) -> Example:
        """Return arguments and keywords of a micro-batch on the meta device, for splitters that run the model.

        They are built from samples of the dataset: a batch taken from the loader would be missing in training.
        """
        return example_batch(self.model, self._sampled_dataset, self.columns.collator(), self.args.micro_batch_size)

    @property
    def _sampled_dataset(self) -> Any:
        return first_dataset(self.eval_dataset) if self.train_dataset is None else self.train_dataset

    def _split(self, model: nn.Module, stage_indices: Sequence[tuple[int, ...]]) -> Split:
        loader = self.eval_dataloader if self.train_dataloader is None else self.train_dataloader
        # `_get_example` reads self.model. Otherwise it stays None until the stages are built.
        self.model = model
        try:
            example = self._get_example(loader)
        finally:
            self.model = None
        return self._split_model(model, example, stage_indices)

    def _split_model(self, model: nn.Module, example: Example, stage_indices: Sequence[tuple[int, ...]]) -> Split:
        """Divide the model into stages; `stage_indices[r]` lists the stages of rank r of the pipeline."""
        ranks = self.ranks
        split: Split = self.model_splitter(
            model, *example, stage_indices, True, device=self.device, rank=ranks.rank, pp_group=ranks.group
        )
        return split

    def _initialize_non_persistent_buffers(self, model: nn.Module) -> None:
        assert self.model_init is not None
        fill_missing_buffers(model, self.model_init, self.args.default_dtype)

    def _wrap_loss_fn(self) -> None:
        pipeline, last = self.pipeline, self.pipeline.num_stages - 1
        with self.team.agreement("making the loss"):
            # Every rank needs the loss to count targets, though only the last stage has the values of the head.
            default = CausalLoss(label_smoothing=self.args.label_smoothing_factor)
            loss_fn = self._maybe_get_fused_loss_fn(pipeline.modules[last], self.given.loss_fn or default)
            is_fused = self.fused_loss_factory is not None and not self._schedule.traits.splits_backward
            head = self.fused_head if is_fused else None
            if is_fused and pipeline.has_last:
                pipeline.running[last] = HiddenStatesModel(pipeline.running[last], always=True)
            step_loss = StepLoss(loss_fn, head=head)
            self._stage_loss = StageLoss(step_loss, self.amp_context, pipeline)
            is_default = self.given.loss_fn is None and self.fused_loss_factory is None
            self.step_loss = ModelLoss(loss_fn, True, step_loss, head, is_default)
            self.loss_fn = TrainingLoss(self.step_loss, self.feed.count, self._num_averaged)

    def _maybe_get_fused_loss_fn(self, module: nn.Module, default_loss_fn: Any) -> Any:
        loss_fn = super()._maybe_get_fused_loss_fn(module, default_loss_fn)
        is_split = self.fused_loss_factory is not None and self._schedule.traits.splits_backward
        return unfused(loss_fn, self._schedule.traits.name) if is_split else loss_fn

    @property
    def _num_averaged(self) -> int:
        return 1

    def _compile_model(self) -> None:
        """Compile each stage separately."""
        with self.team.agreement("compiling stages"):
            self.pipeline.compile(lambda stage: preparation.compiled(stage, self.args))

    def unwrapped_model(self) -> nn.Module:
        """Return this rank's part of the model, under the FQNs of the full model; checkpoints store this part."""
        return super().unwrapped_model() if self.model is None else self.pipeline.part

    def _forward_modules(self) -> nn.Module:
        return self.pipeline.own_modules

    def _whole_model(self) -> nn.Module:
        return self.pipeline.whole

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self.pipeline.named_parameters()

    def _names_elsewhere(self) -> list[str]:
        return self.pipeline.names_elsewhere()

    def _compute_flops_per_token(self) -> float:
        return flops_per_token(self.pipeline.parameter_stats)

    def _follow_optimizer(self) -> None:
        super()._follow_optimizer()
        assert self.optimization is not None
        if self._tied.are_anywhere:
            # A tied weight has copies on several ranks, but counts once in the norm.
            self.optimization.norm = GradientNorm(self._tied.counted(self.optimization.parameters))
        listens = self.is_listened_to("on_train_metrics")
        told = self.team.gather((listens, requirements.learning_rates(self.optimizer)))
        # Callbacks that read the norm of every step may exist on some ranks only. All ranks must agree, since the norm
        # is a collective.
        is_told = any(listens for listens, _ in told)
        self._needs_whole_norm = is_told or self.skips_updates or is_overridden(self, "_all_reduce_norm")
        requirements.require_same_rates([rates for _, rates in told], self.lr_scheduler)

    def _prepare_loop(self) -> None:
        requirements.require_whole_model(type(self).__name__, self.model, self.pipeline.whole)
        super()._prepare_loop()
        self.evaluator.has_losses = self.pipeline.has_last
        self.evaluator.waits_for_errors = False
        self.evaluator.shares_loss = True
        amp, recipes, reducer = self.amp_context, self.recipes, self._make_reducer(self.pipeline)
        number = self.args.n_microbatches
        self._recorder = SlotRecorder(self.args.record_schedule_step, self.device, lambda: self.state.global_step)
        options = (number, amp, recipes, reducer, self._recorder)
        self.runner = StageRunner(self.pipeline, self._schedule, self.ranks, *options)

    def _make_reducer(self, pipeline: PipelineModel) -> StageReducer | None:
        """Return the gradient reducer for several pipelines with copies of the same stages; None for one pipeline."""
        return None

    @property
    def scheduler(self) -> PipelineSchedulerT | None:
        """torch's schedule object; None before preparation."""
        return self.runner.schedule if hasattr(self, "runner") else None

    # --- the step

    def _prepare_batch(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Return inputs and labels without moving them: later, a rank moves only tensors that its stages read."""
        inputs = dict(batch)
        return inputs, inputs.pop("labels", None)

    def _forward_backward_step(self, input_dict: dict[str, Any], labels: Any) -> Tensor:
        """Run torch's schedule on one batch; return its share of the step's loss, or zero without the last stage."""
        require_labels(input_dict, labels)
        if not self._stage_loss.is_resolved:
            self._resolve_loss(input_dict, labels, self.args.micro_batch_size)
        window = self.window
        assert window is not None
        if window.total is None:
            self.feed.count(window)
        assert window.total is not None
        # Without token_weighted_loss, all batches have equal weight. Micro-batches are weighted by their targets anyway.
        total = window.total if self.args.token_weighted_loss else window.count * window.num_shares
        self.loss_fn.was_used = True
        batch = self.pipeline.batch(input_dict, labels, self.args.per_device_train_batch_size)
        loss = self.runner.step(batch, self._stage_loss.of_batch(total, window.is_stand_in))
        if self._should_sync_gradients():
            note(REDUCE)
            self._reduce_gradients()
        return loss

    def _agree_on_loss(self, loss: ModelLoss, batch: Mapping[str, Any] | None) -> None:
        """Do nothing: `_resolve_loss` runs later, because only the last stage sees logits."""

    def _resolve_loss(self, input_dict: dict[str, Any], labels: Tensor, size: int) -> None:
        """Find out from the first micro-batch which labels the loss counts."""
        first, *_ = self.pipeline.micro_batches(input_dict, labels, size)
        self._stage_loss.resolve(first, self.runner.look)

    def _count_batch_tokens(self, input_dict: dict[str, Any], labels: Any) -> int | Tensor:
        return super()._count_batch_tokens(input_dict, labels) if self.pipeline.has_first else 0

    def _reduce_gradients(self) -> None:
        """Sum the gradients of tied weights over their copies, after the last backward pass of a step."""
        if self._tied.are_anywhere:
            self._tied.add_gradients()

    def _clip_grad_norm(self, max_grad_norm: float | None, norm_type: float = 2.0) -> Tensor | None:
        assert self.optimization is not None
        # Without any gradients, torch returns a zero on the CPU. It would use another backend than the other ranks.
        norm = self.optimization.norm(norm_type).to(self.device)
        if max_grad_norm or self._needs_whole_norm:
            norm = self._all_reduce_norm(norm, norm_type)
            self._scale_gradients(max_grad_norm, norm)
        # Otherwise no rank needs the full norm now, and waiting for it would delay ranks that could already step. The
        # norms of stages are combined when they are logged.
        return norm

    def _scale_gradients(self, max_grad_norm: float | None, norm: Tensor) -> None:
        """Scale the gradients of this rank if the norm of all gradients exceeds `max_grad_norm`."""
        assert self.optimization is not None
        self.optimization.clip(max_grad_norm, norm)

    def _all_reduce_norm(self, total_norm: Tensor, norm_type: float) -> Tensor:
        """Return the gradient norm over all stages, from the norm of this rank's gradients."""
        if self.device.type != "cpu" or norm_type == float("inf"):
            return norm_of_group(total_norm, norm_type, self.ranks.group)
        # The team's sum is the fastest collective for CPU tensors. It covers all pipelines, which have equal norms.
        power = self.team.sum(total_norm.double().pow(norm_type)) / self.num_data_parallel_ranks
        return power.pow(1.0 / norm_type).to(total_norm.dtype)

    def _distributed_norms(self, norms: list[float]) -> list[float]:
        if self.args.max_grad_norm or self._needs_whole_norm or not norms:
            return norms
        squares = self.team.sum(torch.tensor(norms, dtype=torch.float64).square()) / self.num_data_parallel_ranks
        return squares.sqrt().tolist()

    def _collect_rank_facts(self) -> None:
        super()._collect_rank_facts()
        # All ranks have recorded the same step, so all of them reach the gather.
        if self._recorder.has_slots:
            told = self.team.gather(self._recorder.read())
            size, number = self.ranks.size, self.args.n_microbatches
            choice = self._schedule
            planned = planned_step(
                choice.schedule_class, size, number, choice.stages_per_rank(self.args.stages_per_rank)
            )
            measured = measured_step(self._recorder.step, self.ranks.pipelines, told)
            self.rank_facts.schedule = {"schedule": choice.traits.name, "n_microbatches": number, **planned, **measured}

    # --- evaluation

    def _prediction_step(self, input_dict: dict[str, Any], labels: Any) -> dict[str, Any]:
        """Return the mean loss, logits and labels of a batch on the last stage; elsewhere zero, None and None."""
        evaluator = self.evaluator
        size = self.args.micro_batch_size if self.pipeline.has_fixed_shapes else self.args.eval_micro_batch_size
        if evaluator.is_unlabelled:
            unlabelled = self.pipeline.micro_batches(input_dict, None, size)
            found = self._stage_loss.logits(unlabelled, self.runner.forward)
            return {"loss": None, "logits": None if found is None else found[: samples_in(input_dict)], "labels": None}
        require_labels(input_dict, labels)
        if not self._stage_loss.is_resolved:
            self._resolve_loss(input_dict, labels, size)
        micro_batches = self.pipeline.micro_batches(input_dict, labels, size)
        wants_logits = evaluator.shows_predictions or is_overridden(self, "_prediction_step")
        mean, logits = self._stage_loss.mean(micro_batches, labels, self.runner.forward, wants_logits)
        if not self.pipeline.has_last:
            return {"loss": mean, "logits": None, "labels": None}
        logits = None if logits is None else logits[: samples_in(input_dict)]
        return {"loss": mean, "logits": logits, "labels": evaluator.label_ids(input_dict, labels.to(self.device))}

    def _shared_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Return the metrics of rank 0 and of the last stage, the only rank where callbacks see logits."""
        told = self.team.gather(metrics)
        return {**told[self.ranks.pipelines[0][self.pipeline.stage_ranks[-1]]], **told[0]}

    # --- generation

    def pipeline_generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        do_sample: bool = True,
        temperature: float = 1.0,
        top_k: int = 0,
        repetition_penalty: float = 1.0,
        use_cache: bool = True,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Continue prompts that are padded on the left; all ranks pass the same prompts and get the same ids.

        Without `eos_token_id` and `pad_token_id`, the tokens of the model's generation config are used.
        """
        self._prepare_to_evaluate(self.eval_dataset)
        options = GenerationOptions(
            max_new_tokens, eos_token_id, pad_token_id, do_sample, temperature, top_k, repetition_penalty, use_cache
        ).with_tokens_of(self.pipeline.whole)
        mask = None if attention_mask is None else attention_mask.to(self.device)
        share = functools.partial(self._share_tokens, len(input_ids))
        stages, can_cache = self.pipeline.own, self.pipeline.all_can_cache
        with torch_settings(self.args), self._gathered(), self.runner.generation():
            run = self.runner.generate
            return generate(run, stages, share, input_ids.to(self.device), options, mask, can_cache=can_cache)

    def _share_tokens(self, num_rows: int, tokens: Tensor | None) -> Tensor:
        shared = torch.empty(num_rows, dtype=torch.int64, device=self.device) if tokens is None else tokens.contiguous()
        dist.broadcast(shared, group=self.ranks.group, group_src=self.pipeline.stage_ranks[-1])
        return shared

    # --- state

    def _get_dataset_sharing_pattern(self) -> SharingPattern:
        return SharingPattern.GLOBAL

    def _model_to_save(self) -> dict[str, Any]:
        parts = {"model_parts": [self.pipeline.part], "shard_index": self.pipeline.shard_index}
        return {"model": self.pipeline.whole, "mesh": self.mesh, **parts}

    def _before_save(self) -> None:
        super()._before_save()
        self._tied.compare()

    def _load_weights_of(self, checkpoint_path: str) -> None:
        self.pipeline.load_weights(checkpoint_path)
