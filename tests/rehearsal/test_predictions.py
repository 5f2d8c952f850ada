"""Predictions on the rehearsal device: they reach host memory without a host wait per batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.guarantees.metrics.metric_runs import BATCH_SIZE, order_metrics, ordered_samples
from tests.support.rehearsal import watching
from tests.support.tiny_models import quiet_trainer, tiny_llama

NUM_SAMPLES = 24


class _Waits:
    """Callback that notes the number of host waits after each batch."""

    changes_control = False

    def __init__(self, record: Any) -> None:
        self._record = record
        self.counts: list[int] = []

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        self.counts.append(self._record.count("sync"))


@pytest.mark.parametrize("every", [None, 5])
@pytest.mark.parametrize("is_labelled", [True, False])
def test_predictions_leave_the_device_without_a_wait_per_batch(
    tmp_path: Path, every: int | None, is_labelled: bool
) -> None:
    samples = ordered_samples(NUM_SAMPLES)
    if not is_labelled:
        samples = [{"input_ids": one["input_ids"]} for one in samples]
    outputs = []
    for uses_cpu in (True, False):
        with watching() as record:
            waits = _Waits(record)
            trainer = quiet_trainer(
                tmp_path,
                tiny_llama(),
                None,
                waits,
                trainer_options={"compute_metrics": order_metrics},
                use_cpu=uses_cpu,
                per_device_eval_batch_size=BATCH_SIZE,
                eval_accumulation_steps=every,
            )
            outputs.append(trainer.predict(samples))
    assert trainer.device.type == "cuda"
    # The first batch resolves the loss.
    assert len(waits.counts) == NUM_SAMPLES // BATCH_SIZE
    assert waits.counts[1:] == [waits.counts[1]] * (len(waits.counts) - 1), record.summary()
    assert record.count("hazard") == 0
    on_cpu, on_device = outputs
    np.testing.assert_allclose(on_device.predictions, on_cpu.predictions, atol=1e-5)
    if is_labelled:
        assert on_device.metrics["test_in_order"] == 1.0
