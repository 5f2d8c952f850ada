"""What a pipeline trainer does before its first step: which rank has which stages, and how they come to be."""

import functools
import logging
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.pipelining import ScheduleGPipe

from forgather.ml.distributed.environment import get_requested_timeout, get_world_size
from forgather.ml.trainer.coordinated import CoordinatedTrainer
from forgather.ml.trainer.loading.data_order import WHOLE, Part
from forgather.ml.trainer.pipeline.model_splitter import ModelSplitter
from forgather.ml.trainer.pipeline.pipeline_arguments import PipelineTrainingArguments
from forgather.ml.trainer.pipeline.pipeline_batches import PipelineBatch, taken_apart
from forgather.ml.trainer.pipeline.pipeline_model import PipelineModel, model_without_memory, whole_model
from forgather.ml.trainer.pipeline.pipeline_utils import pipeline_stage_indices
from forgather.ml.trainer.pipeline.schedules import check_layout, find_schedule, traits_of
from forgather.ml.trainer.pipeline.splitters.causal_lm import create_causal_lm_splitter
from forgather.ml.trainer.pipeline.splitters.example_batch import example_batch, sample_batch
from forgather.ml.trainer.pipeline.tied_weights import TiedWeight, tied_weights
from forgather.ml.trainer.recipes.layers import apply_layer_recipe
from forgather.ml.trainer.setup.devices import moved
from forgather.ml.trainer.setup.given_objects import explains_calls
from forgather.ml.trainer.setup.rank_settings import described
from forgather.ml.trainer.setup.seeding import seed_everything, seed_of_rank, undisturbed_random_numbers
from forgather.ml.trainer.step_loss.own_loss import compared, reason_for_own_loss
from forgather.ml.utils import ModelParameterStats

logger = logging.getLogger(__name__)


class StagedTrainer(CoordinatedTrainer):
    """Ranks with consecutive parts of one model, which are built but not yet run."""

    arguments_class = PipelineTrainingArguments
    pipeline: PipelineModel

    @explains_calls
    def __init__(
        self,
        *,
        args: Any,
        model_splitter: ModelSplitter | None = None,
        pipe_schedule_factory: Any = ScheduleGPipe,
        **trainer_kwargs: Any,
    ) -> None:
        super().__init__(args=args, **trainer_kwargs)
        self._model_splitter = model_splitter or create_causal_lm_splitter()
        is_bound = isinstance(pipe_schedule_factory, functools.partial)
        self._schedule_class = find_schedule(pipe_schedule_factory.func if is_bound else pipe_schedule_factory)
        self._schedule_factory = pipe_schedule_factory if is_bound else self._schedule_class
        self._traits = traits_of(self._schedule_class)
        self._tied: list[TiedWeight] = []
        self._returns: Any = None
        self._refuse_what_pipelines_cannot()

    def _refuse_what_pipelines_cannot(self) -> None:
        if self.model is not None:
            raise ValueError(
                f"{type(self).__name__} was given a ready model, but every rank is to build only its own stages: pass "
                "model_init, a function without arguments that builds the model, instead of model."
            )
        for name in ("_given_optimizer", "_given_scheduler"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{type(self).__name__} was given a ready {name.removeprefix('_given_')}, which cannot know the parameters "
                    "of stages that are yet to be built: pass optimizer_factory or optimizer_cls_and_kwargs, and "
                    "lr_scheduler_factory."
                )
        traits, args = self._traits, self.args
        if traits.splits_backward and args.torch_compile:
            raise ValueError(
                f"torch_compile=True cannot be combined with schedule={traits.name!r}: it computes gradients of inputs and of "
                "weights apart, which compiled stages cannot. Turn torch_compile off, or use 1f1b or interleaved1f1b."
            )
        if traits.splits_backward and args.fuse_optim_with_backward:
            raise ValueError(
                f"fuse_optim_with_backward=True cannot be combined with schedule={traits.name!r}: it computes gradients of "
                "weights apart from the backward pass in which they would be updated. Use gpipe, or turn it off."
            )
        if args.is_multistage and not traits.is_multistage:
            raise ValueError(
                f"is_multistage=True does not go with schedule={traits.name!r}, which runs one stage per rank. Leave "
                "is_multistage alone, or choose another schedule."
            )
        if args.pp_stage_type == "v" and traits.stage_type != "v":
            raise ValueError(
                f"pp_stage_type='v' does not go with schedule={traits.name!r}, whose ranks have stages in a loop. Leave "
                "pp_stage_type alone, or choose zbv or dualpipev."
            )
        if args.stages_per_rank > 1 and not traits.is_multistage:
            # Known without the ranks; the rest is checked when those are.
            check_layout(self._schedule_class, 2, args.stages_per_rank, args.n_microbatches)
        self._refuse_too_few_ranks()

    @property
    def _stages_per_rank(self) -> int:
        return max(int(self.args.stages_per_rank), self._traits.default_stages_per_rank)

    # --- ranks

    def _make_mesh(self) -> DeviceMesh:
        return dist.device_mesh.init_device_mesh(
            self.env.device_type, (self.env.world_size,), mesh_dim_names=("pipeline_parallel",)
        )

    def _init_distributed(self) -> None:
        super()._init_distributed()
        if self.args.debug_pipeline:
            logging.getLogger("torch.distributed.pipelining").setLevel(logging.DEBUG)
        if self._traits.splits_backward:
            # What a compiled part of a stage would reuse for its gradients is needed twice.
            torch._functorch.config.donated_buffer = False
        check_layout(self._schedule_class, self._pp_size, self._stages_per_rank, self.args.n_microbatches)

    def _common_settings(self) -> dict[str, str]:
        generating = [type(one).__qualname__ for one in self.callbacks if getattr(one, "needs_all_ranks", False)]
        return {
            **super()._common_settings(),
            "schedule": self._traits.name,
            "model_splitter": described(self._model_splitter),
            # Stages send each other what such a callback generates.
            "callbacks that need all ranks": described(generating),
        }

    def _refuse_too_few_ranks(self) -> None:
        if (get_world_size() if self.distributed_env is None else self.distributed_env.world_size) < 2:
            raise ValueError(
                f"{type(self).__name__} needs at least two ranks, and this job has one. Start it with forgather train "
                "--nproc 2 (or torchrun --nproc-per-node 2), or use Trainer on one device."
            )

    @property
    def _pp_size(self) -> int:
        return int(self.env.world_size)

    @property
    def _pp_rank(self) -> int:
        return dist.get_rank(self._pp_group)

    @property
    def _pp_group(self) -> ProcessGroup:
        assert self._mesh is not None
        return self._mesh.get_group("pipeline_parallel")

    @property
    def _pipelines(self) -> list[list[int]]:
        """The ranks of each pipeline."""
        return [list(range(self.env.world_size))]

    def _return_group(self) -> ProcessGroup | None:
        """Another group of this pipeline's ranks, for what passes from higher ranks to lower ones; collective."""
        if self._traits.is_multistage and self._returns is None:
            for ranks in self._pipelines:
                group = dist.new_group(ranks, timeout=get_requested_timeout())
                self._returns = group if self.env.rank in ranks else self._returns
        return self._returns

    def get_process_groups(self) -> dict[str, ProcessGroup]:
        return {"pp_group": self._pp_group}

    def _is_pipeline_parallel(self) -> bool:
        return True

    def _is_model_parallel(self) -> bool:
        return True

    # --- data

    def _dispatches(self, for_training: bool) -> bool:
        return True

    def _dispatcher_mesh(self, for_training: bool) -> tuple[DeviceMesh, int | None]:
        assert self._mesh is not None
        return self._mesh, None

    @property
    def _data_part(self) -> Part:
        return WHOLE

    @property
    def _speaks_for_batches(self) -> bool:
        return self._pp_rank == 0

    def _taken_apart(self, batch: Mapping[str, Any], num_rows: int) -> PipelineBatch:
        main_input = getattr(self.pipeline.whole, "main_input_name", "input_ids")
        inputs, keywords, labels = taken_apart(batch, main_input, num_rows)
        if self.pipeline.make_mask is not None:
            mask = self.pipeline.make_mask(**{main_input: inputs, **keywords})
            keywords = {**keywords, "attention_mask": mask} if mask is not None else keywords
        # The first stage reads the inputs and the last one the labels; of the inputs all others need the shape.
        if self.pipeline.has_first:
            inputs = moved(inputs, self.device)
        if labels is not None and self.pipeline.has_last:
            labels = moved(labels, self.device)
        return PipelineBatch(inputs, dict(moved(keywords, self.device)), labels)

    # --- the model

    def _prepare_model(self) -> None:
        starts_over = self._has_trained and self._resume is False
        if self.model is None or starts_over:
            # Two models at once might be one too many.
            self.model = self._forward_model = None
            vars(self).pop("pipeline", None)
            self._build_pipeline()
        seed_everything(seed_of_rank(self.seed, self.env.rank))

    def _build_pipeline(self) -> None:
        assert self.model_init is not None
        args = self.args
        dataset = self.eval_dataset if self.train_dataset is None else self.train_dataset
        rows = max(args.per_device_train_batch_size // args.n_microbatches, 1)
        with undisturbed_random_numbers(), self._agreement("dividing the model into stages"):
            whole = model_without_memory(self.model_init, args.default_dtype)
            _refuse_own_loss(whole, self.compute_loss_func)
            example = example_batch(whole, dataset, self.data_collator, rows)
            indices = pipeline_stage_indices(
                self._pp_size, self._pp_size * self._stages_per_rank, self._traits.stage_type
            )
            self.pipeline = PipelineModel(
                whole, self._model_splitter, example, indices, self.device, self._pp_rank, self._pp_group
            )
        if args.debug_split_model:
            self.pipeline.log_stages()
        self._fill_stages()
        self.model = self.pipeline.part
        own = dict(self.model.named_parameters(remove_duplicate=False))
        self._tied = tied_weights(self.pipeline.sharing, self.pipeline.names_of_ranks, own, self._pipelines)
        self._has_tied = any(self._peers.gather(bool(self._tied)))
        if self._has_tied and args.fuse_optim_with_backward:
            raise ValueError(
                "fuse_optim_with_backward=True cannot be combined with weights that are tied between stages: their gradients "
                "are added up between ranks before an update. Turn it off, or set tie_word_embeddings=False in the model's "
                "configuration."
            )
        with self._agreement("applying recipes to stages"):
            for module in self.pipeline.own.values():
                apply_layer_recipe(module, args)
                if args.gradient_checkpointing:
                    self._enable_activation_checkpoint_fn(self.env.rank, module)
        if args.debug_model_params:
            self.pipeline.log_parameters()

    def _fill_stages(self) -> None:
        """Values from a checkpoint come later; else from the whole model, which rank 0 alone builds."""
        assert self.model_init is not None
        if self._resume is not False and self._loads_weights():
            with undisturbed_random_numbers(), self._agreement("computing buffers"):
                self.pipeline.fill_missing_buffers(self.model_init, self.args.default_dtype)
            return
        source: nn.Module | None = None
        with self._agreement("building the model"):
            if self.env.rank == 0:
                source = whole_model(
                    self.model_init, self.device, self.args.construct_model_on, self.args.default_dtype
                )
                self.pipeline.check_source(source)
                self._refuse_differing_loss(source)
        if self.args.debug_model_init:
            logger.info("rank 0 sends %d tensors to their ranks", sum(map(len, self.pipeline.names_of_ranks)))
        self._give_values(source)

    def _refuse_differing_loss(self, source: nn.Module) -> None:
        """Where the whole model is: its own loss must be the causal one, for want of another."""
        if self.compute_loss_func is not None:
            return
        dataset = self.eval_dataset if self.train_dataset is None else self.train_dataset
        with undisturbed_random_numbers():
            batch = dict(sample_batch(source, dataset, self.data_collator, 2))
        device = next((parameter.device for parameter in source.parameters()), torch.device("cpu"))
        inputs = dict(moved(batch, device))
        labels = inputs.pop("labels", None)
        if not isinstance(labels, Tensor):
            return
        with self.amp.autocast():
            comparison = compared(source, inputs, labels)
        if comparison.problem:
            logger.info("Whether the model has a loss of its own could not be found out: %s", comparison.problem)
        if comparison.differs and comparison.causal is not None:
            raise _own_loss_refusal(source, f"the loss that it computes from labels is another: {comparison}")

    def _give_values(self, source: nn.Module | None) -> None:
        self.pipeline.fill_from(source)

    def _count_parameters(self) -> ModelParameterStats:
        return self.pipeline.parameter_stats

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self.pipeline.named_parameters()


def _refuse_own_loss(model: nn.Module, loss_fn: Any) -> None:
    reason = None if loss_fn is not None else reason_for_own_loss(model)
    if reason is not None:
        raise _own_loss_refusal(model, reason)


def _own_loss_refusal(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"{type(model).__name__} needs a loss of its own, since {reason}, but in a pipeline the loss is computed from the "
        "logits of the last stage. Pass compute_loss_func, a function of (logits, labels), or train on one device."
    )
