"""Pipeline parallelism: every rank has some layers of the model, and batches pass through all of them in parts."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from forgather.ml.checkpoint.optimizer_state import OptimizerState
from forgather.ml.loss import CausalLoss
from forgather.ml.sharded_checkpoint import load_into_modules, locate_weights
from forgather.ml.trainer.checkpoint_types import SharingPattern, StateComponent
from forgather.ml.trainer.coordinated import CoordinatedTrainer
from forgather.ml.trainer.data_order import WHOLE, Part
from forgather.ml.trainer.evaluating import Prediction
from forgather.ml.trainer.evaluation import EvaluationSums, samples_in
from forgather.ml.trainer.gradients import GradientNorm
from forgather.ml.trainer.loss_weighting import StepLoss
from forgather.ml.trainer.model_loss import ModelLoss, Window, reason_for_own_loss
from forgather.ml.trainer.pipeline.causal_lm_splitter import create_causal_lm_splitter
from forgather.ml.trainer.pipeline.example_batch import example_batch
from forgather.ml.trainer.pipeline.forward_only import ForwardOnly, Metas
from forgather.ml.trainer.pipeline.generation import GenerationOptions, generate
from forgather.ml.trainer.pipeline.pipeline_arguments import PipelineTrainingArguments
from forgather.ml.trainer.pipeline.pipeline_batches import PipelineBatch, taken_apart
from forgather.ml.trainer.pipeline.pipeline_model import PipelineModel, model_without_memory, whole_model
from forgather.ml.trainer.pipeline.pipeline_utils import pipeline_stage_indices
from forgather.ml.trainer.pipeline.schedule_runner import ScheduleRunner, micro_batches
from forgather.ml.trainer.pipeline.schedules import check_layout, find_schedule, traits_of
from forgather.ml.trainer.pipeline.splitting import ModelSplitter, Stage
from forgather.ml.trainer.pipeline.tied_weights import TiedWeight, add_gradients, tied_weights, total_norm
from forgather.ml.trainer.pipeline.trained_stage import TrainedStage
from forgather.ml.trainer.seeding import seed_everything, seed_of_rank, undisturbed_random_numbers
from forgather.ml.trainer.synchronized_dataloader import Rounds
from forgather.ml.trainer.trainer_utils import moved, set_train
from forgather.ml.utils import ModelParameterStats

__all__ = ["PipelineTrainer", "PipelineTrainingArguments"]

logger = logging.getLogger(__name__)


class PipelineTrainer(CoordinatedTrainer):
    """Ranks with consecutive parts of one model, which all train on the same batches.

    A pipeline trains exactly like one device with the same batches. The model comes as `model_init`, since no rank is to
    hold all of it; `pipe_schedule_factory` is a schedule of torch.distributed.pipelining, or its name.
    """

    arguments_class = PipelineTrainingArguments
    pipeline: PipelineModel

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
        self._schedule_factory = self._chosen_factory(pipe_schedule_factory)
        factory: Any = self._schedule_factory
        self._schedule_class = find_schedule(getattr(factory, "func", factory))
        self._traits = traits_of(self._schedule_class)
        self._tied: list[TiedWeight] = []
        self._loss_total: int | Tensor = 1
        self._refuse_what_pipelines_cannot()

    def _chosen_factory(self, given: Any) -> Any:
        named = self.args.schedule
        if named is not None and given is not ScheduleGPipe and find_schedule(named) is not find_schedule(given):
            raise ValueError(
                f"schedule={named!r} and pipe_schedule_factory={given!r} are different schedules: give one of the two."
            )
        chosen = given if named is None else named
        return chosen if isinstance(chosen, functools.partial) else find_schedule(chosen)

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
        self._refuse_too_few_ranks()
        if self._traits.splits_backward:
            # What a compiled part of a stage would reuse for its gradients is needed twice.
            torch._functorch.config.donated_buffer = False
        check_layout(self._schedule_class, self._pp_size, self._stages_per_rank, self.args.n_microbatches)

    def _refuse_too_few_ranks(self) -> None:
        if self.env.world_size < 2:
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
        if args.gradient_checkpointing:
            for module in self.pipeline.own.values():
                self._enable_activation_checkpoint_fn(self.env.rank, module)
        if args.debug_model_params:
            self.pipeline.log_parameters()

    def _fill_stages(self) -> None:
        """Values from a checkpoint come later; else from the whole model, which rank 0 alone builds."""
        assert self.model_init is not None
        if self._resume is not False and self._loads_weights():
            with undisturbed_random_numbers(), self._agreement("computing buffers"):
                self.pipeline.fill_missing_buffers(self.model_init)
            return
        source: nn.Module | None = None
        with self._agreement("building the model"):
            if self.env.rank == 0:
                source = whole_model(
                    self.model_init, self.device, self.args.construct_model_on, self.args.default_dtype
                )
        if self.args.debug_model_init:
            logger.info("rank 0 sends %d tensors to their ranks", sum(map(len, self.pipeline.names_of_ranks)))
        self._give_values(source)

    def _give_values(self, source: nn.Module | None) -> None:
        self.pipeline.fill_from(source)

    def _count_parameters(self) -> ModelParameterStats:
        return self.pipeline.parameter_stats

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self.pipeline.named_parameters()

    def _compile_model(self) -> None:
        """Compile each stage by itself, and make what runs them."""
        pipeline, args = self.pipeline, self.args
        self._forward_model = nn.ModuleList(pipeline.own.values())
        # What a stage computes with; the modules themselves are what is generated with and checkpointed.
        running = {stage.stage_index: self._compiled(stage.submod) for stage in pipeline.stages}
        for stage in pipeline.stages:
            stage.submod = running[stage.stage_index]
        options = (pipeline.stage_ranks, self._pp_group, self.device, pipeline.boundary)
        self._forward_only = ForwardOnly(running, *options)
        self._generating = ForwardOnly(pipeline.own, *options)
        loss_fn = self.compute_loss_func or CausalLoss()
        self.model_loss = ModelLoss(loss_fn, token_weighted=True)
        self._stage_loss = StepLoss(loss_fn)
        self._runner = ScheduleRunner(
            pipeline.stages, self._make_schedule, self._make_stage, self._metas_between, args.n_microbatches
        )
        self._fill = args.per_device_train_batch_size

    def _compiled(self, module: Any) -> Any:
        if not self.args.torch_compile:
            return module
        return torch.compile(module, **self._compile_options())

    def _make_schedule(self, stages: list[Stage]) -> Any:
        return self._schedule_factory(
            stages if self._traits.is_multistage else stages[0],
            n_microbatches=self.args.n_microbatches,
            loss_fn=self._loss_of_micro_batch,
            scale_grads=False,
        )

    def _make_stage(self, like: PipelineStage, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> TrainedStage:
        stage = TrainedStage(
            like.submod, like.stage_index, like.num_stages, like.device, inputs, outputs, group=like.group
        )
        stage.splits_backward = self._traits.splits_backward
        return stage

    def _metas_between(self, inputs: Tensor, keywords: Mapping[str, Any]) -> dict[int, Metas]:
        with self._looking_only():
            return self._forward_only.metas_between(inputs, keywords)

    # --- the step

    def _accumulate_gradients(self, window: Window) -> Tensor:
        self._resolve_loss(window.batches[0], self._fill)
        loss = super()._accumulate_gradients(window)
        self._finish_gradients()
        return loss

    def _finish_gradients(self) -> None:
        """Bring together what ranks have computed of the gradients of one weight."""
        add_gradients(self._tied)

    def _forward_backward_step(self, window: Window, number: int) -> Tensor:
        assert window.total is not None
        if self.args.token_weighted_loss:
            self._loss_total = window.total
        else:
            # Batches weigh the same; the micro-batches of one are weighed by their targets.
            self._loss_total = window.counts[number] * window.num_shares
        inputs, keywords, labels = self._taken_apart(window.batches[number], self._fill)
        if labels is None:
            raise ValueError("There is no loss to train on: the batch has no 'labels'.")
        with self.amp.autocast():
            losses = self._runner.step(inputs, keywords, labels)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)

    def _loss_of_micro_batch(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The share of a micro-batch in the loss of the step."""
        return self._stage_loss.share(logits, labels, self._stage_loss.count(labels), self._loss_total, 2)

    def _resolve_loss(self, batch: Mapping[str, Any], num_rows: int) -> None:
        """Let every rank know which labels the loss counts; the last stage finds out, from logits of the first batch."""
        if self._stage_loss.is_resolved:
            return
        inputs, keywords, labels = self._taken_apart(batch, num_rows)
        number = inputs.shape[0] // self._micro_batch_size(num_rows)
        parts = micro_batches({"": inputs, "labels": labels, **keywords}, inputs.shape[0], number)[:1]
        own_labels = [part.pop("labels") for part in parts]

        def resolve(_: int, logits: Tensor) -> None:
            self._stage_loss.resolve(logits, own_labels[0])

        with self._looking_only():
            self._forward_only.run([part.pop("") for part in parts], parts, resolve)
        self._stage_loss.adopt(
            next(one for one in self._peers.gather(self._stage_loss.first_counts) if one is not None)
        )
        self.model_loss = ModelLoss(self.compute_loss_func, token_weighted=True, step_loss=self._stage_loss)

    def _looking_only(self) -> Any:
        """Run stages without any trace: no gradients, no random numbers, no statistics."""
        return _looking_only(self._forward_model)

    def _micro_batch_size(self, num_rows: int) -> int:
        return num_rows // int(self.args.n_microbatches)

    def _clip_grad_norm(self, max_grad_norm: float | None, norm_type: float = 2.0) -> Tensor | None:
        norm = total_norm(self._gradient_norm(norm_type), norm_type, self._pp_group, self.device)
        if max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, max_grad_norm, norm)
        return norm

    def _init_optimizer(self) -> None:
        super()._init_optimizer()
        # A weight with copies on several ranks counts once.
        copies = {id(weight.parameter) for weight in self._tied if not weight.counts_here}
        self._gradient_norm = GradientNorm([one for one in self._parameters if id(one) not in copies])
        self.optimizer_state = OptimizerState(self.optimizer, self._named_parameters())

    # --- evaluation

    def _evaluate_in_round(self, batch: Mapping[str, Any], sums: EvaluationSums, rounds: Rounds) -> None:
        # An error is not kept until the end of the round: the other stages wait for this one now.
        self._evaluate_batch(batch, sums)

    def _evaluate_batch(self, batch: Mapping[str, Any], sums: EvaluationSums) -> None:
        prediction = Prediction(*self._prediction_step(batch))
        if self.pipeline.has_last:
            sums.add(prediction.loss, prediction.targets, samples_in(batch))
        self._dispatch(
            "on_prediction_step",
            loss=prediction.loss,
            tokens=prediction.targets,
            batch=batch,
            logits=prediction.logits,
            labels=prediction.labels,
        )

    def _prediction_step(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """As on one device where the last stage is; other ranks have no loss, and say zero."""
        num_parts = min(int(self.args.n_microbatches), int(self.args.per_device_eval_batch_size))
        num_rows = -(-int(self.args.per_device_eval_batch_size) // num_parts) * num_parts
        self._resolve_loss(batch, num_rows)
        inputs, keywords, labels = self._taken_apart(batch, num_rows)
        if labels is None:
            raise ValueError("There is no loss to evaluate: the batch has no 'labels'.")
        count = self.model_loss.count(batch.get("labels"), batch)
        parts = micro_batches({"": inputs, **keywords}, inputs.shape[0], num_parts)
        label_parts = micro_batches({"labels": labels}, inputs.shape[0], num_parts)
        shares: list[Tensor] = []
        all_logits: list[Tensor] = []
        wants_logits = self._callback_handler.listens("on_prediction_step")

        def consume(number: int, logits: Tensor) -> None:
            part = label_parts[number]["labels"]
            shares.append(self._stage_loss.share(logits, part, self._stage_loss.count(part), count, 2))
            if wants_logits:
                all_logits.append(logits)

        with self.amp.autocast():
            self._forward_only.run([part.pop("") for part in parts], parts, consume)
        if not self.pipeline.has_last:
            return torch.zeros(()), 0
        rows = samples_in(batch)
        logits = torch.cat(all_logits)[:rows] if all_logits else None
        return torch.stack(shares).sum(), count, logits, labels[:rows] if wants_logits else None

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
        """Continue prompts, which are padded on the left; all ranks call it and get the same ids.

        Without `eos_token_id` and `pad_token_id` those of the model's generation config are used.
        """
        self._prepare_evaluation()
        defaults = getattr(self.pipeline.whole, "generation_config", None)
        options = GenerationOptions(
            max_new_tokens,
            getattr(defaults, "eos_token_id", None) if eos_token_id is None else eos_token_id,
            getattr(defaults, "pad_token_id", None) if pad_token_id is None else pad_token_id,
            do_sample,
            temperature,
            top_k,
            repetition_penalty,
            use_cache,
        )
        mask = None if attention_mask is None else attention_mask.to(self.device)
        with set_train(self._forward_model, False), torch.no_grad(), self.amp.autocast():
            return generate(
                self._run_stages,
                self.pipeline.own,
                functools.partial(self._share_tokens, len(input_ids)),
                input_ids.to(self.device),
                options,
                mask,
                can_cache=self.pipeline.all_can_cache,
            )

    def _run_stages(
        self, inputs: Tensor, keywords: Mapping[str, Any], stage_keywords: Mapping[int, Mapping[str, Any]]
    ) -> Tensor | None:
        results: list[Tensor] = []
        self._generating.run([inputs], [keywords], lambda _, logits: results.append(logits[:, -1:]), stage_keywords)
        return results[0] if results else None

    def _share_tokens(self, num_rows: int, tokens: Tensor | None) -> Tensor:
        shared = torch.empty(num_rows, dtype=torch.int64, device=self.device) if tokens is None else tokens.contiguous()
        dist.broadcast(shared, group=self._pp_group, group_src=self.pipeline.stage_ranks[-1])
        return shared

    # --- state

    def _model_component(self) -> StateComponent:
        return self._as_part(super()._model_component())

    def get_state_components(self) -> list[StateComponent]:
        return [self._as_part(one) if one.key == "optimizer" else one for one in super().get_state_components()]

    def _as_part(self, component: StateComponent) -> StateComponent:
        return dataclasses.replace(component, sharing_pattern=SharingPattern.PER_RANK)

    def _get_dataset_sharing_pattern(self) -> SharingPattern:
        return SharingPattern.GLOBAL

    def _model_to_save(self) -> dict[str, Any]:
        return {
            **super()._model_to_save(),
            "model": self.pipeline.whole,
            "model_parts": [self.pipeline.part],
            "shard_index": self.pipeline.shard_index,
        }

    def _load_weights_of(self, checkpoint_path: str) -> None:
        names = self.pipeline.whole.state_dict(keep_vars=True).keys()
        load_into_modules(locate_weights(checkpoint_path), [self.pipeline.part], True, names)


@contextlib.contextmanager
def _looking_only(model: nn.Module) -> Iterator[None]:
    with undisturbed_random_numbers(), set_train(model, False), torch.no_grad():
        yield


def _refuse_own_loss(model: nn.Module, loss_fn: Any) -> None:
    reason = None if loss_fn is not None else reason_for_own_loss(model)
    if reason is not None:
        raise ValueError(
            f"{type(model).__name__} needs a loss of its own, since {reason}, but in a pipeline the loss is computed from the "
            "logits of the last stage. Pass compute_loss_func, a function of (logits, labels), or train on one device."
        )
