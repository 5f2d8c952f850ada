"""Pipeline parallelism: every rank has some layers of the model, and batches pass through all of them in parts."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from forgather.ml.checkpoint.components import SharingPattern, StateComponent
from forgather.ml.checkpoint.weights.module_weights import load_into_modules, locate_weights
from forgather.ml.loss import CausalLoss
from forgather.ml.trainer.loading.collation import require_mapping
from forgather.ml.trainer.loading.empty_batch import EmptyBatch
from forgather.ml.trainer.loop.evaluation_sums import EvaluationSums, samples_in
from forgather.ml.trainer.loop.gradients import GradientNorm
from forgather.ml.trainer.loop.progress import fits_any_groups
from forgather.ml.trainer.pipeline.forward_only import ForwardOnly, Meta, Metas
from forgather.ml.trainer.pipeline.generation import GenerationOptions, generate
from forgather.ml.trainer.pipeline.model_splitter import Stage
from forgather.ml.trainer.pipeline.pipeline_arguments import PipelineTrainingArguments
from forgather.ml.trainer.pipeline.pipeline_preparation import StagedTrainer
from forgather.ml.trainer.pipeline.schedules.runner import ScheduleRunner, micro_batches
from forgather.ml.trainer.pipeline.schedules.trained_stage import TrainedStage
from forgather.ml.trainer.pipeline.tied_weights import add_gradients, compare_copies, total_norm
from forgather.ml.trainer.setup.model_modes import set_train
from forgather.ml.trainer.setup.seeding import undisturbed_random_numbers
from forgather.ml.trainer.setup.torch_settings import torch_settings
from forgather.ml.trainer.step_loss.fused import HiddenStatesModel, make_fused_loss, output_embeddings_of, unfused
from forgather.ml.trainer.step_loss.loss_traits import Traits
from forgather.ml.trainer.step_loss.model_loss import ModelLoss, Window
from forgather.ml.trainer.step_loss.token_weighting import StepLoss
from forgather.ml.trainer.synchronized_dataloader import Rounds

__all__ = ["PipelineTrainer", "PipelineTrainingArguments"]

_SEVERAL = 2
"""A micro-batch is never the whole step."""


class PipelineTrainer(StagedTrainer):
    """Ranks with consecutive parts of one model, which all train on the same batches.

    A pipeline trains exactly like one device with the same batches. The model comes as `model_init`, since no rank is to
    hold all of it; `pipe_schedule_factory` is a schedule of torch.distributed.pipelining, or its name.
    """

    _loss_total: int | Tensor = 1
    """What the losses of the present batch are divided by."""
    _shows_norms = False
    """Whether a callback of some rank is told of the norm of every step."""
    _is_stand_in = False
    """Whether the present batch only stands in for one, and weighs nothing."""

    # --- what runs the stages

    def _compile_model(self) -> None:
        """Compile each stage by itself, and make what runs them."""
        pipeline, args = self.pipeline, self.args
        self._forward_model = nn.ModuleList(pipeline.own.values())
        # What a stage computes with; the modules themselves are what is generated with and checkpointed.
        with self._agreement("making the loss"):
            running, loss_fn, head = self._with_fused_loss(dict(pipeline.own))
        running = {index: self._compiled(module) for index, module in running.items()}
        for stage in pipeline.stages:
            stage.submod = running[stage.stage_index]
        groups = (self._pp_group, self._return_group())
        options = (pipeline.stage_ranks, groups, self.device, pipeline.boundary)
        self._forward_only = ForwardOnly(running, *options)
        self._generating = ForwardOnly(pipeline.own, *options)
        self._loss_function = loss_fn
        self._stage_loss = StepLoss(loss_fn, head=head)
        # What the last stage finds out about the loss, counting knows at once.
        is_default = self.compute_loss_func is None and self._fused_loss_factory is None
        self.model_loss = ModelLoss(loss_fn, True, self._stage_loss, head, is_default)
        self._runner = ScheduleRunner(
            pipeline.stages, self._make_schedule, self._make_stage, self._metas_between, args.n_microbatches
        )

    def _with_fused_loss(self, modules: dict[int, Any]) -> tuple[dict[int, Any], Any, nn.Module | None]:
        """What runs, with the loss and, if that is a fused one, the head that it takes the place of."""
        if self._fused_loss_factory is None:
            return modules, self.compute_loss_func or CausalLoss(), None
        last = self.pipeline.num_stages - 1
        # On every rank, since counting targets takes the loss; but for one it is that of a head without values.
        head = output_embeddings_of(self.pipeline.modules[last])
        loss_fn = make_fused_loss(self._fused_loss_factory, head)
        if self._traits.splits_backward:
            return modules, unfused(loss_fn, self._traits.name), None
        if last in modules:
            modules[last] = HiddenStatesModel(modules[last])
        return modules, loss_fn, head

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
        stage.context = self._forward_context
        stage.expected = None if stage.is_last else tuple(map(Meta.of, outputs))
        return stage

    def _metas_between(self, inputs: Tensor, keywords: Mapping[str, Any]) -> dict[int, Metas]:
        with self._looking_only(), self.amp.autocast():
            return self._forward_only.metas_between(inputs, keywords)

    # --- the step

    def _accumulate_gradients(self, window: Window) -> Tensor:
        for batch in window.batches:
            _require_labels(batch)
        self._resolve_loss(window.batches[0], self._micro_batch_size)
        loss = super()._accumulate_gradients(window)
        self._finish_gradients()
        return loss

    def _finish_gradients(self) -> None:
        """Bring together what ranks have computed of the gradients of one weight."""
        add_gradients(self._tied)

    def _forward_backward_step(self, window: Window, number: int) -> Tensor:
        assert window.total is not None
        self._is_stand_in = isinstance(window.batches[number], EmptyBatch)
        if self.args.token_weighted_loss:
            self._loss_total = window.total
        else:
            # Batches weigh the same; the micro-batches of one are weighed by their targets.
            self._loss_total = window.counts[number] * window.num_shares
        inputs, keywords, labels = self._taken_apart(window.batches[number], int(self.args.per_device_train_batch_size))
        # Stages of ours enter it for their forward passes alone; traced ones are torch's.
        with self._forward_context() if self._has_fixed_shapes else contextlib.nullcontext():
            losses = self._runner.step(inputs, keywords, labels)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)

    def _forward_context(self) -> contextlib.AbstractContextManager[Any]:
        """What the forward passes of stages run in."""
        return self._offloading() if self._offloads_activations else self.amp.autocast()

    @contextlib.contextmanager
    def _offloading(self) -> Iterator[None]:
        with self.amp.autocast(), self._activation_context():
            yield

    def _loss_of_micro_batch(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The share of a micro-batch in the loss of the step."""
        with self.amp.autocast():
            if self._is_stand_in:
                return self._stage_loss.nothing(logits)
            count = self._stage_loss.count(labels) if self._stage_loss.needs_counts else 0
            return self._stage_loss.share(logits, labels, count, self._loss_total, _SEVERAL)

    def _resolve_loss(self, batch: Mapping[str, Any], size: int) -> None:
        """Let every rank know which labels the loss counts; the last stage finds out, from the first micro-batch."""
        if self._stage_loss.is_resolved:
            return
        inputs, keywords, labels = self._taken_apart(batch, size)
        number = inputs.shape[0] // size
        parts = micro_batches({"": inputs, "labels": labels, **keywords}, inputs.shape[0], number)[:1]
        own_labels = [part.pop("labels") for part in parts]

        def resolve(_: int, logits: Tensor) -> None:
            self._stage_loss.resolve(logits, own_labels[0])

        with self._looking_only(), self.amp.autocast():
            self._forward_only.run([part.pop("") for part in parts], parts, resolve)
        # Among the ranks of this pipeline only: others may have no batch now, and will find out the same.
        answer = torch.tensor([(self._stage_loss.traits or Traits()).code], device=self.device)
        dist.broadcast(answer, group=self._pp_group, group_src=self.pipeline.stage_ranks[-1])
        self._stage_loss.adopt(Traits.of_code(int(answer.item())))

    def _looking_only(self) -> Any:
        """Run stages without any trace: no gradients, no random numbers, no statistics."""
        return _looking_only(self._forward_model)

    @property
    def _has_fixed_shapes(self) -> bool:
        return any(getattr(stage, "fixed_shapes", False) for stage in self.pipeline.stages)

    @property
    def _micro_batch_size(self) -> int:
        return int(self.args.per_device_train_batch_size) // int(self.args.n_microbatches)

    @property
    def _eval_micro_batch_size(self) -> int:
        if self._has_fixed_shapes:
            return self._micro_batch_size
        return -(-int(self.args.per_device_eval_batch_size) // int(self.args.n_microbatches))

    def _clip_grad_norm(self, max_grad_norm: float | None, norm_type: float = 2.0) -> Tensor | None:
        # Without any gradients torch makes a zero on the CPU, which would go over another network than those of other ranks.
        own = self._gradient_norm(norm_type).to(self.device)
        if not max_grad_norm and not self._needs_whole_norm:
            # Nobody needs the whole norm now. To wait for it would keep a rank that is done from stepping while others
            # compute; the parts are put together when they are logged.
            return own
        norm = self._norm_of_all_stages(own, norm_type)
        if max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, max_grad_norm, norm)
        return norm

    @property
    def _needs_whole_norm(self) -> bool:
        """Whether a callback is told of the norm of every step, or all stages skip an update for it."""
        return self._shows_norms or self._skips_updates

    def _distributed_norms(self, norms: list[float]) -> list[float]:
        if self.args.max_grad_norm or self._needs_whole_norm or not norms:
            return norms
        squares = self._sum(torch.tensor(norms, dtype=torch.float64).square()) / self._num_data_parallel_ranks()
        return squares.sqrt().tolist()

    def _norm_of_all_stages(self, own: Tensor, norm_type: float) -> Tensor:
        if self.device.type != "cpu" or norm_type == float("inf"):
            return total_norm(own, norm_type, self._pp_group)
        # A number that is on the CPU already goes the quickest way, which leads over all pipelines.
        power = self._sum(own.double().pow(norm_type)) / self._num_data_parallel_ranks()
        return power.pow(1.0 / norm_type).to(own.dtype)

    def _whole_model(self) -> nn.Module:
        return self.pipeline.whole

    def _names_elsewhere(self) -> list[str]:
        here = {name for name, _ in self._named_parameters()}
        whole = self.pipeline.whole.named_parameters()
        return [name for name, parameter in whole if parameter.requires_grad and name not in here]

    def _init_optimizer(self) -> None:
        super()._init_optimizer()
        # A weight with copies on several ranks counts once.
        copies = {id(weight.parameter) for weight in self._tied if not weight.counts_here}
        if self._step_in_backward is None:
            self._gradient_norm = GradientNorm([one for one in self._parameters if id(one) not in copies])
        listens = self._callback_handler.listens("on_train_metrics")
        rates = [_number(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups]
        told = self._peers.gather((listens, rates))
        # Callbacks may be on some ranks only, and all must know.
        self._shows_norms = any(listens for listens, _ in told)
        self._require_same_rates([rates for _, rates in told])

    def _require_same_rates(self, rates: list[list[float | None]]) -> None:
        """A schedule is saved once for all ranks, and must fit the groups of each."""
        if any(one != rates[0] for one in rates) and not fits_any_groups(self.lr_scheduler):
            listing = "; ".join(f"rank {rank}: {own}" for rank, own in enumerate(rates))
            raise ValueError(
                f"The optimizers of the stages have parameter groups with different learning rates ({listing}), and "
                f"{type(self.lr_scheduler).__name__} has one state for all of them, which would not fit them after a resume. "
                "Make the groups by optimizer_groups, which all ranks then have, or use a schedule by lr_scheduler_type."
            )

    # --- evaluation

    def _loss_for_evaluation(self) -> ModelLoss:
        return self.model_loss

    def _agree_on_loss(self, batch: Mapping[str, Any] | None) -> None:
        """Nothing: the last stage finds out, and tells the others."""

    def _shared_metrics(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Those of rank 0, and of the last stage, where alone callbacks see logits."""
        told = self._peers.gather(metrics)
        return {**told[self._pipelines[0][self.pipeline.stage_ranks[-1]]], **told[0]}

    def _evaluate_in_round(self, batch: Mapping[str, Any], sums: EvaluationSums, rounds: Rounds) -> None:
        # An error is not kept until the end of the round: the other stages wait for this one now.
        self._evaluate_batch(batch, sums)

    @property
    def _has_predictions(self) -> bool:
        return self.pipeline.has_last

    def _prediction_step(self, batch: Mapping[str, Any]) -> tuple[Any, ...]:
        """As on one device where the last stage is; other ranks have no loss, and say zero."""
        _require_labels(batch)
        size = self._eval_micro_batch_size
        num_rows = -(-samples_in(batch) // size) * size
        self._resolve_loss(batch, size)
        inputs, keywords, labels = self._taken_apart(batch, num_rows)
        num_parts = num_rows // size
        assert labels is not None
        count = self.model_loss.count(batch.get("labels"), batch)
        parts = micro_batches({"": inputs, **keywords}, inputs.shape[0], num_parts)
        label_parts = micro_batches({"labels": labels}, inputs.shape[0], num_parts)
        shares: list[Tensor] = []
        all_logits: list[Tensor] = []
        wants_logits = self._shows_predictions

        def consume(number: int, logits: Tensor) -> None:
            part = label_parts[number]["labels"]
            shares.append(self._stage_loss.share(logits, part, self._stage_loss.count(part), count, _SEVERAL))
            if wants_logits:
                all_logits.append(self._stage_loss.logits(logits))

        with self.amp.autocast():
            self._forward_only.run([part.pop("") for part in parts], parts, consume)
        if not self.pipeline.has_last:
            return torch.zeros(()), 0
        rows = samples_in(batch)
        logits = torch.cat(all_logits)[:rows] if all_logits else None
        mean = self._stage_loss.mean(torch.stack(shares).sum(), count)
        return mean, count, logits, labels[:rows] if wants_logits else None

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
        """Continue prompts, which are padded on the left; all ranks call it with the same ones, and get the same ids.

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
        with (
            torch_settings(self.args),
            set_train(self._forward_model, False),
            torch.no_grad(),
            self.amp.autocast(),
        ):
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
        components = super().get_state_components()
        return [self._as_part(one) if one.key in ("optimizer", "ema") else one for one in components]

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

    def _before_save(self) -> None:
        super()._before_save()
        if self._has_tied:
            compare_copies(self._tied, self._peers)

    def _load_weights_of(self, checkpoint_path: str) -> None:
        names = self.pipeline.whole.state_dict(keep_vars=True).keys()
        load_into_modules(locate_weights(checkpoint_path), [self.pipeline.part], True, names)


def _require_labels(batch: Mapping[str, Any]) -> None:
    """On every rank, before any of them waits for another."""
    require_mapping(batch)
    if not isinstance(batch.get("labels"), Tensor):
        raise ValueError(
            f"There is no loss to train on or to evaluate: the batch has no 'labels'; it has: {', '.join(map(str, batch))}."
        )


def _number(rate: Any) -> float | None:
    # Some optimizers find their own.
    return None if rate is None else float(rate)


@contextlib.contextmanager
def _looking_only(model: nn.Module) -> Iterator[None]:
    with undisturbed_random_numbers(), set_train(model, False), torch.no_grad():
        yield
