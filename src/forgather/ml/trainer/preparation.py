"""Everything a trainer does before its first step, in the order in which it happens."""

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from forgather.ml.checkpoint.components import require_known_components, select_components
from forgather.ml.checkpoint.manager import CheckpointConfig, CheckpointManager
from forgather.ml.checkpoint.state.optimizer_state import OptimizerState
from forgather.ml.checkpoint.state.rng import RNGState
from forgather.ml.distributed import (
    DistributedEnvInterface,
    DistributedEnvironment,
    StaticDistributedEnvironment,
    get_world_size,
)
from forgather.ml.distributed.launch_variables import check_launch_variables
from forgather.ml.optim.opt_utils import check_group_map
from forgather.ml.trainer.amp import AMPContext
from forgather.ml.trainer.loading.builders import ResumableLoader, build_eval_loader, build_train_loader
from forgather.ml.trainer.loading.data_order import WHOLE, Part
from forgather.ml.trainer.loop.gradients import GradientNorm
from forgather.ml.trainer.loop.progress import SchedulerState, TrainerProgress, kept_rates
from forgather.ml.trainer.loop.signals import StopSignals
from forgather.ml.trainer.recipes import RecipeTrainer
from forgather.ml.trainer.setup.given_objects import check_optimization, explains_calls
from forgather.ml.trainer.setup.model_construction import build_model, refuse_quantized
from forgather.ml.trainer.setup.optimizer_construction import (
    build_optimizer,
    build_scheduler,
    group_weight_decay,
    optimizer_factory,
    undecayed_names,
)
from forgather.ml.trainer.setup.rank_settings import require_strategy_for_ranks
from forgather.ml.trainer.setup.seeding import choose_seed, seed_everything, seed_of_rank
from forgather.ml.trainer.setup.trainer_utils import choose_device, enable_hf_activation_checkpointing, require_device
from forgather.ml.trainer.step_loss.fused import HiddenStatesModel, make_fused_loss, output_embeddings_of
from forgather.ml.trainer.step_loss.model_loss import ModelLoss
from forgather.ml.trainer.trainer_types import (
    BaseDataset,
    EnableCheckpointFnT,
    FusedLossFactoryT,
    LRSchedulerFactoryT,
    LRSchedulerT,
    OptimizerFactoryT,
    OptimizerT,
)

logger = logging.getLogger(__name__)

NO_STEP_LIMIT = 2**62


class PreparedTrainer(RecipeTrainer):
    """Builds what training needs, through hooks that strategies override."""

    handles_ranks: ClassVar[bool] = False
    """Whether several processes may train with it: a subclass that synchronises their models itself sets it to True."""

    _progress: TrainerProgress
    _component_keys: tuple[str, ...] = ("model", "optimizer", "scheduler", "ema", "trainer", "dataset", "rng")
    """Of all components that `get_state_components` may declare, depending on the settings."""

    @explains_calls
    def __init__(
        self,
        *,
        args: Any,
        distributed_env: DistributedEnvInterface | None = None,
        optimizer: OptimizerT | None = None,
        lr_scheduler: LRSchedulerT | None = None,
        optimizer_factory: OptimizerFactoryT | None = None,
        optimizer_cls_and_kwargs: tuple[type, dict[str, Any]] | None = None,
        lr_scheduler_factory: LRSchedulerFactoryT | None = None,
        enable_activation_checkpoint_fn: EnableCheckpointFnT = enable_hf_activation_checkpointing,
        fused_loss_factory: FusedLossFactoryT | None = None,
        optimizer_groups: Mapping[str, Any] | None = None,
        loss_fn: Any = None,
        **base_kwargs: Any,
    ) -> None:
        if loss_fn is not None:
            if base_kwargs.get("compute_loss_func") is not None:
                raise ValueError("loss_fn is another name of compute_loss_func: give one of the two.")
            base_kwargs["compute_loss_func"] = loss_fn
        super().__init__(args, **base_kwargs)
        self._refuse_what_needs_a_builder()
        self._require_eval_dataset()
        self.distributed_env = distributed_env
        self.optimizer: Any = optimizer
        self.lr_scheduler: Any = lr_scheduler
        self._given_optimizer, self._given_scheduler = optimizer, lr_scheduler
        self._optimizer_factory = optimizer_factory
        self._optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self._lr_scheduler_factory = lr_scheduler_factory
        self._enable_activation_checkpoint_fn = enable_activation_checkpoint_fn
        self._optimizer_groups = optimizer_groups
        self._fused_loss_factory = fused_loss_factory
        self._refuse_what_is_no_function()
        self._refuse_unknown_components()
        self._refuse_recipes()
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        self._dataset_of_loader: Any = None
        self.checkpoint_manager: CheckpointManager | None = None
        self._forward_model: Any = None
        self._resume: bool | str = False
        self._asked_to_resume: bool | str | None = None
        self._resume_path: str | None = None
        self._to_be_loaded: bool | str = False
        self._claim: CheckpointManager | None = None
        self._loaded_path: str | None = None
        self._has_trained = False
        self._signals: StopSignals | None = None

    def _refuse_unknown_components(self) -> None:
        """A trainer that declares components of its own is asked for them only when they exist, before the first step."""
        self._require_average_if_named()
        if not type(self).get_state_components.__module__.startswith("forgather."):
            return
        for setting in ("checkpoint_components", "skip_checkpoint_components"):
            require_known_components(self._component_keys, getattr(self.args, setting) or (), setting)

    def _require_average_if_named(self) -> None:
        if "ema" in (self.args.checkpoint_components or ()) and self.args.ema_decay is None:
            raise ValueError(
                "checkpoint_components names 'ema', the averaged weights, but ema_decay=None keeps none. Set ema_decay, or "
                "leave 'ema' out."
            )

    def _refuse_what_is_no_function(self) -> None:
        functions = {
            "optimizer_factory": self._optimizer_factory,
            "lr_scheduler_factory": self._lr_scheduler_factory,
            "enable_activation_checkpoint_fn": self._enable_activation_checkpoint_fn,
            "fused_loss_factory": self._fused_loss_factory,
        }
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise ValueError(f"{name}={function!r} cannot be used: it has to be a function.")
        if self._optimizer_groups is not None:
            check_group_map(self._optimizer_groups)
        check_optimization(self._given_optimizer, self._given_scheduler, self._optimizer_cls_and_kwargs)

    def _refuse_what_needs_a_builder(self) -> None:
        for name, default in (("default_dtype", None), ("construct_model_on", "default")):
            if self.model_init is None and getattr(self.args, name) != default:
                raise ValueError(
                    f"{name}={getattr(self.args, name)!r} says how to build the model, but it was given ready: pass "
                    "model_init, a function that builds it, instead of model."
                )

    def _require_eval_dataset(self) -> None:
        asked = {"eval_strategy": self.args.eval_strategy != "no", "eval_on_save": self.args.eval_on_save}
        for name, needs_dataset in asked.items():
            if needs_dataset and self.eval_dataset is None:
                raise ValueError(
                    f"{name}={getattr(self.args, name)!r} asks for evaluations, but there is no eval_dataset. Give one to the "
                    "trainer, or turn the evaluations off."
                )

    # --- the order of things

    def _prepare(self, resume: bool | str) -> None:
        """Everything up to the first step of training."""
        self._refuse_averages_in_model()
        require_strategy_for_ranks(type(self), self.distributed_env)
        self._asked_to_resume = resume
        self._init_distributed()
        self._init_device()
        self._init_precision()
        self._init_seeds()
        self._resolve_checkpoint(resume)
        self._init_dataloaders()
        self._prepare_model()
        self._compile_model()
        self._init_optimizer()
        self._wrap()
        self._init_state()
        self._init_checkpoint_manager()
        if self._average is not None and self._resume is False:
            self._average.begin()
        self._restore()
        # What a model brings along, or an interrupted step left, must not enter the first step.
        self.optimizer.zero_grad()
        self._dispatch("on_init_end")

    def _prepare_evaluation(self) -> None:
        """The part of it that an evaluation without training needs."""
        if self._forward_model is None:
            self._init_distributed()
            self._init_device()
            self._init_precision()
            self._init_seeds()
            self._prepare_model()
            self._compile_model()
            self._wrap()
        if self.state is None:
            self._init_state()

    # --- hooks

    def _init_distributed(self) -> None:
        """Find this process's place in the job."""
        if self.distributed_env is None:
            check_launch_variables()
        if self.distributed_env is not None:
            self.env = self.distributed_env
        elif get_world_size() > 1:
            self.env = DistributedEnvironment(no_accelerator=self.args.use_cpu)
        else:
            self.env = StaticDistributedEnvironment()

    def _init_device(self) -> None:
        """Choose the device: the one asked for, else an accelerator, else the CPU."""
        require_device(self.args.device)
        self.device = choose_device(self.args.device, self._device_type(), self.env)
        if self.device.index is not None and torch.accelerator.device_count() > 1:
            # Statistics, and kernels of other packages, take the current device for the one that is meant.
            torch.accelerator.set_device_index(self.device.index)

    def _init_precision(self) -> None:
        """Settings of torch that hold for the whole process, and mixed precision."""
        if self.args.float32_matmul_precision is not None:
            torch.set_float32_matmul_precision(self.args.float32_matmul_precision)
        if self.args.dynamo_recompile_limit is not None:
            from torch._dynamo import config as dynamo_config

            dynamo_config.recompile_limit = self.args.dynamo_recompile_limit
        self.amp = AMPContext(self.args.mixed_precision, self.device.type)
        self._say_what_has_no_effect()

    def _init_seeds(self) -> None:
        """The same seed for the model on every rank; ranks go their own ways afterwards."""
        self.seed = choose_seed(self.args.seed)
        self.rng = RNGState(self.seed)
        seed_everything(self.seed)

    def _resolve_checkpoint(self, resume: bool | str) -> None:
        """Take the output directory, and decide from what to resume."""
        if self._claim is not None:
            # One that was not ended by a run, such as that of a save before training, would be held for ever.
            self._claim.close()
        self._claim = CheckpointManager(self._checkpoint_config(), self.env, None, None)
        path = self._claim.resolve_checkpoint_path(resume)
        self._resume = False if path is None else resume
        # What `load_checkpoint` is about to load decides on the groups of the optimizer too.
        self._resume_path = path or self._claim.resolve_checkpoint_path(self._to_be_loaded)

    def _init_dataloaders(self) -> None:
        """Make the loader of training batches."""
        self.train_dataloader = self._build_train_loader()

    def _build_train_loader(self, part: Part = WHOLE) -> ResumableLoader:
        """A loader of the batches of one part of the data."""
        if self.train_dataset is None:
            raise ValueError("train() needs a train_dataset; only evaluate() works without one.")
        return build_train_loader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            collate_fn=self.data_collator,
            seed=self.seed,
            shuffle=self.args.shuffle,
            drop_last=self.args.dataloader_drop_last,
            set_dataset_epoch=self.args.set_dataset_epoch,
            part=part,
            **self._worker_options(),
        )

    def _init_eval_dataloader(self, dataset: BaseDataset) -> Any:
        """Make a loader of evaluation batches."""
        return self._build_eval_loader(dataset)

    def _build_eval_loader(self, dataset: BaseDataset, part: Part = WHOLE) -> Any:
        return build_eval_loader(
            dataset,
            batch_size=self.args.per_device_eval_batch_size,
            collate_fn=self.data_collator,
            drop_last=self.args.dataloader_drop_last,
            part=part,
            **self._worker_options(),
        )

    def _prepare_model(self) -> None:
        """Build the model unless it was given, and put it on the device; a fresh start begins with a fresh one."""
        starts_over = self._has_trained and self._resume is False and self.model_init is not None
        if self.model is None or starts_over:
            assert self.model_init is not None
            self.model = build_model(
                self.model_init,
                self.device,
                self.args.construct_model_on,
                self.args.default_dtype,
                will_be_loaded=self._resume is not False and self._loads_weights(),
            )
        else:
            self.model.to(self.device)
        self._apply_layer_recipe()
        if self.args.gradient_checkpointing:
            self._enable_activation_checkpoint_fn(self.env.rank, self.model)
        seed_everything(seed_of_rank(self.seed, self.env.rank))

    def _loads_weights(self) -> bool:
        return self._loads("model")

    def _loads(self, key: str) -> bool:
        chosen = self.args.checkpoint_components
        return (chosen is None or key in chosen) and key not in self.args.skip_checkpoint_components

    def _compile_model(self) -> None:
        """Wrap the model for the forward pass; what is checkpointed stays the model itself."""
        model, head = self.unwrapped_model(), None
        self._loss_function = self.compute_loss_func
        self._forward_model = model
        if self._fused_loss_factory is not None:
            with self.amp.autocast():
                # As it will run: some attention works in few bits only.
                head = output_embeddings_of(model)
            self._loss_function = make_fused_loss(self._fused_loss_factory, head)
            self._forward_model = HiddenStatesModel(model)
        if self.args.torch_compile:
            self._forward_model = torch.compile(self._forward_model, **self._compile_options())
        self.model_loss = ModelLoss(self._loss_function, self.args.token_weighted_loss, head=head)

    def _compile_options(self) -> dict[str, Any]:
        return {
            "backend": self.args.torch_compile_backend or "inductor",
            "mode": self.args.torch_compile_mode,
            "dynamic": self.args.torch_compile_dynamic,
            "fullgraph": self.args.torch_compile_full_graph,
        }

    def _init_optimizer(self) -> None:
        """Make optimizer and schedule, and note the options as the user set them."""
        refuse_quantized(self.unwrapped_model())
        named = self._named_parameters()
        factory = optimizer_factory(self.args, self._optimizer_factory, self._optimizer_cls_and_kwargs)
        self.optimizer = self._given_optimizer or build_optimizer(
            named, factory, self._optimizer_groups, self.args.debug_optimizer_groups, self._names_elsewhere()
        )
        self.weight_decay_groups = self._group_weight_decay(named)
        self.optimizer_state = OptimizerState(self.optimizer, named)
        self._parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self._gradient_norm = GradientNorm(self._parameters)
        self._init_optimizer_recipes(named)
        self._num_steps = self._planned_steps()
        if self._given_scheduler is None:
            self._init_scheduler()
        else:
            self.lr_scheduler = self._given_scheduler
            self._scheduler_state = SchedulerState(self.lr_scheduler, self.optimizer)

    def _group_weight_decay(self, named: list[tuple[str, nn.Parameter]]) -> str:
        if self._given_optimizer is not None or self._optimizer_groups is not None:
            return "all"
        undecayed = undecayed_names(self._whole_model())
        trainable = [name for name, parameter in named if parameter.requires_grad]
        has_decayed = any(name not in undecayed for name in (*trainable, *self._names_elsewhere()))
        stored = None
        if self._resume_path is not None and (self._loads("optimizer") or self._loads("scheduler")):
            assert self._claim is not None
            stored = self._claim.stored_weight_decay_groups(self._resume_path)
        return group_weight_decay(self.optimizer, named, undecayed, has_decayed, self.args.weight_decay_groups, stored)

    def _whole_model(self) -> nn.Module:
        """The model with all its modules, in which other ranks may have the values of some."""
        return self.unwrapped_model()

    def _names_elsewhere(self) -> list[str]:
        """The trainable parameters of the model that other ranks have and this one has not."""
        return []

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What the optimizer is given: the parameters of this rank, under the names of the whole model."""
        return list(self.unwrapped_model().named_parameters())

    def _wrap(self) -> None:
        """Wrap the model for a strategy; one device needs nothing."""

    def _init_checkpoint_manager(self) -> None:
        """Make the manager for the state as it is declared now."""
        if self.checkpoint_manager is not None:
            self.checkpoint_manager.close()
        self.checkpoint_manager = CheckpointManager(
            self._checkpoint_config(),
            self.env,
            self,
            **self._model_to_save(),
            model_preprocessor=self.processing_class,
            callbacks=self.callbacks,
            skip_checkpoint_components=self._skipped_components,
            on_save_error=self.args.on_save_error,
        )
        # Now rather than at the first save: an unknown name must not end a run that has trained for hours.
        components = self.get_state_components()
        select_components(components, self.args.checkpoint_components)
        select_components(components, self._skipped_components, "skip_checkpoint_components")
        self._require_supplier_of_best()

    @property
    def _skipped_components(self) -> list[str]:
        """Without an average there is none to skip, and a setting that says so may stay."""
        return [key for key in self.args.skip_checkpoint_components if key != "ema" or self._average is not None]

    def _require_supplier_of_best(self) -> None:
        chosen = self.args.checkpoint_components
        can_supply = any(hasattr(callback, "on_load_model_weights") for callback in self.callbacks)
        if self.args.load_best_model_at_end and chosen is not None and "model" not in chosen and not can_supply:
            raise ValueError(
                f"load_best_model_at_end=True needs the weights of the best checkpoint, but checkpoint_components={chosen} "
                "saves none, and no callback implements on_load_model_weights to supply them. Add 'model', or the callback, "
                "or set load_best_model_at_end=False."
            )

    def _model_to_save(self) -> dict[str, Any]:
        """The model as coordinator and manager take it; more than one argument where ranks have parts of it."""
        return {"model": self.unwrapped_model()}

    def _restore(self) -> None:
        """Load what was resolved; a damaged checkpoint gives way to an older one only if none was named."""
        assert self.checkpoint_manager is not None
        if self._resume is False:
            self.checkpoint_manager.begin_fresh_run()
            return
        path = self._load_state(None if self._resume is True else str(self._resume))
        logger.info("Resumed from %s", path)
        if self.state.epoch_train_steps != max(self._steps_per_epoch(), 1):
            self._plan_anew()

    def _load_state(self, path: str | None) -> str | None:
        assert self.checkpoint_manager is not None
        if self._average is not None:
            self._average.forget()
        loaded = self.checkpoint_manager.load_checkpoint(path)
        if loaded is not None and not self.checkpoint_manager.is_own(loaded):
            self._progress.forget_best()
        if self._average is not None:
            self._average.begin()
        return loaded

    def _plan_anew(self) -> None:
        """Steps have another size than those of the checkpoint: count the rest of training in the new ones."""
        state, steps_per_epoch = self.state, max(self._steps_per_epoch(), 1)
        position = self.train_dataloader.state_dict()
        num_left = steps_per_epoch
        if position.get("num_samples"):
            samples_per_batch = self.args.per_device_train_batch_size * self._num_data_parallel_ranks()
            num_left = self._num_steps_of((position["num_samples"] - position["index"]) / samples_per_batch)
        state.epoch_train_steps = steps_per_epoch
        state.epoch_start_step = state.global_step + num_left - steps_per_epoch
        if self.args.max_steps >= 0 or self.args.num_train_epochs < 0:
            return
        epochs_left = self.args.num_train_epochs - state.raw_epoch
        state.max_steps = self._num_steps = state.epoch_start_step + math.ceil(epochs_left * steps_per_epoch)
        if self._given_scheduler is None:
            progress = self.lr_scheduler.state_dict()
            # A new schedule sets the groups to its beginning.
            with kept_rates(self.optimizer):
                self._init_scheduler()
            self._scheduler_state.load_state_dict(progress)
            self._update_context()

    def _init_scheduler(self) -> None:
        self.lr_scheduler = build_scheduler(
            self.args, self.optimizer, self._lr_scheduler_factory, min(self._num_steps, NO_STEP_LIMIT)
        )
        self._scheduler_state = SchedulerState(self.lr_scheduler, self.optimizer)

    @abstractmethod
    def _update_context(self) -> None:
        """Tell callbacks of the objects there are now."""

    @abstractmethod
    def _init_state(self) -> None:
        """Set the counters of training to its beginning."""

    # --- arithmetic and settings

    def _checkpoint_config(self) -> CheckpointConfig:
        return CheckpointConfig(
            output_dir=self.args.output_dir,
            save_total_limit=self.args.save_total_limit,
            save_on_each_node=self.args.save_on_each_node,
            save_safetensors=self.args.save_safetensors,
        )

    def _worker_options(self) -> dict[str, Any]:
        return {
            "num_workers": self.args.dataloader_num_workers,
            "pin_memory": self.args.dataloader_pin_memory and self.device.type == "cuda",
            "persistent_workers": self.args.dataloader_persistent_workers and self.args.dataloader_num_workers > 0,
            "prefetch_factor": self.args.dataloader_prefetch_factor,
        }

    def _steps_per_epoch(self) -> int:
        """Optimizer steps in a whole epoch; an assumption for loaders without a length."""
        num_batches = self.train_dataloader.num_batches
        if num_batches is None:
            return int(self.args.epoch_train_steps)
        return max(self._num_steps_of(num_batches), 1)

    def _num_steps_of(self, num_batches: float) -> int:
        """The steps that so many batches make; a fraction is an incomplete one."""
        accumulation = self.args.gradient_accumulation_steps
        if self.args.dataloader_drop_last:
            return math.floor(num_batches) // accumulation
        return math.ceil(math.ceil(num_batches) / accumulation)

    @abstractmethod
    def _num_data_parallel_ranks(self) -> int:
        """How many ranks share the batches of a step."""

    def _planned_steps(self) -> int:
        """How many steps training is to take, as far as that is known."""
        if self.args.max_steps >= 0:
            return int(self.args.max_steps)
        if self.args.num_train_epochs < 0:
            return NO_STEP_LIMIT
        return math.ceil(self.args.num_train_epochs * self._steps_per_epoch())
