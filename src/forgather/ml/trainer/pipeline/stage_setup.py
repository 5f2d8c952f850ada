"""StageSetup: builds the model on the meta device, splits it into stages, and fills this rank's stages with values.

Every method is collective. An error on one rank while models are built or split raises on all ranks. Called by
`PipelineTrainer` when it prepares its model.
"""

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from forgather.ml.trainer.pipeline.model_splitter import Split
from forgather.ml.trainer.pipeline.pipeline_arguments import PipelineTrainingArguments
from forgather.ml.trainer.pipeline.pipeline_model import PipelineModel
from forgather.ml.trainer.pipeline.pipeline_ranks import PipelineRanks
from forgather.ml.trainer.pipeline.pipeline_requirements import OwnLossCheck, require_untied_weights
from forgather.ml.trainer.pipeline.pipeline_utils import pipeline_stage_indices, tensors_of
from forgather.ml.trainer.pipeline.schedules import ScheduleChoice
from forgather.ml.trainer.pipeline.tied_weights import TiedWeights, tied_weights
from forgather.ml.trainer.ranks.same_model import require_same_model, require_same_stages
from forgather.ml.trainer.ranks.team import RankTeam, Team
from forgather.ml.trainer.recipes.activation_checkpointing import checkpointing_function
from forgather.ml.trainer.recipes.layers import apply_layer_recipe
from forgather.ml.trainer.setup.seeding import undisturbed_random_numbers
from forgather.ml.trainer.trainer_types import EnableCheckpointFnT

logger = logging.getLogger(__name__)

Splitter = Callable[[nn.Module, Sequence[tuple[int, ...]]], Split]
"""Function that divides a model into stages, given the stages of each rank."""
Construct = Callable[[torch.device], nn.Module]
"""Function that builds the full model on a device: without memory on the meta device, otherwise with its values."""


class StageSetup:
    """Builder of the `PipelineModel` of a rank. All ranks call each method together."""

    def __init__(
        self,
        args: PipelineTrainingArguments,
        splitter: Splitter,
        schedule: ScheduleChoice,
        team: Team,
        ranks: PipelineRanks,
        device: torch.device,
        loss_check: OwnLossCheck,
    ) -> None:
        self._args = args
        self._splitter = splitter
        self._schedule = schedule
        assert isinstance(team, RankTeam), "a pipeline has at least two ranks"
        self._team = team
        self._ranks = ranks
        self._device = device
        self._loss_check = loss_check

    def divide(self, construct: Construct) -> PipelineModel:
        """Return the split model with this rank's stages allocated, but without values."""
        ranks = self._ranks
        num_stages = ranks.size * self._schedule.stages_per_rank(self._args.stages_per_rank)
        # This build must not advance the random state: `fill` draws the initial values as on one device.
        with undisturbed_random_numbers(), self._team.agreement("building the model without memory"):
            whole = construct(torch.device("meta"))
        # Compared before the first exchange of tensors: gloo ends the process when sizes differ. Tensors of the same
        # size would be exchanged without a word.
        require_same_model(whole, self._team.peers)
        with undisturbed_random_numbers(), self._team.agreement("dividing the model into stages"):
            indices = pipeline_stage_indices(ranks.size, num_stages, self._schedule.traits.stage_type)
            self._loss_check.look_at_whole(whole)
            pipeline = PipelineModel(
                whole,
                lambda model: self._splitter(model, indices),
                indices,
                self._device,
                ranks.rank,
                ranks.group,
            )
        require_same_stages(pipeline.modules, self._team.peers)
        if self._args.debug_split_model:
            pipeline.log_stages()
        return pipeline

    def prepare_to_load(self, pipeline: PipelineModel, fill_buffers: Callable[[nn.Module], None]) -> None:
        """Compute buffers that checkpoints do not hold; all other values are loaded from a checkpoint later."""
        with undisturbed_random_numbers(), self._team.agreement("computing buffers"):
            fill_buffers(pipeline.part)

    def fill(self, pipeline: PipelineModel, construct: Construct) -> None:
        """Give all stages the initial values of the full model; only rank 0 builds and checks it."""
        source: nn.Module | None = None
        # No collectives inside `agreement`. If rank 0 fails, all ranks raise before they wait for its values.
        with self._team.agreement("building the model"):
            if self._team.rank == 0:
                on_device = self._args.construct_model_on == "device"
                source = construct(self._device if on_device else torch.device("cpu"))
                pipeline.check_source(source)
                self._loss_check.look_at_source(source)
        if self._args.debug_model_init:
            logger.info("rank 0 sends %d tensors to their ranks", sum(map(len, pipeline.names_of_ranks)))
        # Rank 0 of the job is the first rank of pipeline 0. The other pipelines get copies of these stages.
        if self._ranks.replica == 0:
            pipeline.fill_from(source)
        self._copy_to_replicas(pipeline)

    def tie(self, pipeline: PipelineModel) -> TiedWeights:
        """Create the process groups between copies of tied weights, and return the copies of this rank."""
        own = dict(pipeline.part.named_parameters(remove_duplicate=False))
        weights = tied_weights(pipeline.sharing, pipeline.names_of_ranks, own, self._ranks.pipelines)
        # Collective, so ranks without tied weights create it as well.
        tied = TiedWeights(weights, self._team.gather)
        if tied.are_anywhere:
            require_untied_weights(self._args)
        return tied

    def apply_recipes(self, pipeline: PipelineModel, checkpoint_activations: EnableCheckpointFnT | None) -> None:
        enable = checkpointing_function(self._args, checkpoint_activations)
        with self._team.agreement("applying recipes to stages"):
            for module in pipeline.own.values():
                apply_layer_recipe(module, self._args)
                if enable is not None:
                    enable(self._team.rank, module)
        if self._args.debug_model_params:
            pipeline.log_parameters()

    def _copy_to_replicas(self, pipeline: PipelineModel) -> None:
        if self._ranks.replicas is None:
            return
        # By identity, so that a tensor with several names is broadcast once. Replicas have the same order of names.
        tensors = {id(tensor): tensor for tensor in tensors_of(pipeline.part).values()}
        works = [
            dist.broadcast(tensor.detach(), group=self._ranks.replicas, group_src=0, async_op=True)
            for tensor in tensors.values()
        ]
        for work in works:
            assert work is not None
            work.wait()
