"""FacadeEvaluator: evaluations during training through the facade's `evaluate`, so that an override is called.

Metrics may differ between ranks, because scripts compute some of them on the main process only. Rank 0 decides.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from forgather.hf.methods import call
from forgather.ml.trainer.loop.evaluator import Batch, Evaluator

if TYPE_CHECKING:
    from forgather.hf.engine.hooks import FacadeHooks


class FacadeEvaluator(Evaluator):
    """Evaluator of an engine."""

    _trainer: "FacadeHooks"

    @classmethod
    def of(cls, evaluator: Evaluator, engine: "FacadeHooks") -> "FacadeEvaluator":
        """Return an evaluator with the settings that the strategy has made."""
        own = cls(engine)
        vars(own).update(vars(evaluator))
        return own

    def evaluate_in_training(self) -> None:
        """Evaluate at the current step, once, and request a save of a new best model with save_strategy="best"."""
        engine, state = self._trainer, self._trainer.loop.state
        before = state.best_metric
        super().evaluate_in_training()
        if state.best_metric != before:
            engine.state.best_global_step = state.global_step
            engine.control.should_save = engine.control.should_save or engine.facade._saves_best

    def _count(self, batch: Batch, labels: Any) -> int | Tensor:
        # An override of `_prepare_inputs` may have changed the labels.
        facade = self._trainer.facade
        changed, facade._prepared_labels = facade._prepared_labels, None
        if self.is_unlabelled or changed is None or changed is labels:
            return super()._count(batch, labels)
        return self.loss.count(changed, {"labels": changed})

    def _metrics_in_training(self) -> dict[str, Any]:
        # The facade's evaluate logs the metrics itself.
        facade = self._trainer.facade
        metrics = call(facade.evaluate, ignore_keys=facade._ignore_keys_for_eval) or {}
        return self._trainer._shared_metrics(dict(metrics))
