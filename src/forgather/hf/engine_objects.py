"""EngineObjects: attributes of `transformers.Trainer` that belong to the engine, such as model, optimizer and state.

`Trainer` of this package inherits them. Invariant: the engine holds the only reference, so both always agree.
"""

from typing import Any

from torch import nn

from forgather.hf.engine.hooks import FacadeHooks
from forgather.hf.engine.outputs import EngineState
from forgather.ml.trainer.trainer_types import TrainerControl


class EngineObjects:
    """Attributes of a facade that are read from its engine."""

    engine: FacadeHooks
    _first_state: EngineState

    @property
    def model(self) -> Any:
        """Model without wrappers."""
        return None if self.engine.model is None else self.engine.unwrapped_model()

    @model.setter
    def model(self, model: nn.Module | None) -> None:
        self.engine.model = model

    @property
    def model_wrapped(self) -> Any:
        """Model that runs the forward pass, such as DDP."""
        return self.engine.model

    @property
    def optimizer(self) -> Any:
        return self.engine.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self.engine.optimizer = optimizer

    @property
    def lr_scheduler(self) -> Any:
        return self.engine.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, lr_scheduler: Any) -> None:
        self.engine.lr_scheduler = lr_scheduler

    @property
    def state(self) -> EngineState:
        state: EngineState | None = self.engine.state
        return self._first_state if state is None else state

    @property
    def control(self) -> TrainerControl:
        return self.engine.control

    @control.setter
    def control(self, control: Any) -> None:
        """Accept the control that an event returned: it is the control of the engine."""

    @property
    def compute_metrics(self) -> Any:
        return self.engine.compute_metrics

    @compute_metrics.setter
    def compute_metrics(self, function: Any) -> None:
        self.engine.compute_metrics = function

    @property
    def preprocess_logits_for_metrics(self) -> Any:
        return self.engine.preprocess_logits_for_metrics

    @preprocess_logits_for_metrics.setter
    def preprocess_logits_for_metrics(self, function: Any) -> None:
        self.engine.preprocess_logits_for_metrics = function
