"""Drop-in on the rehearsal device: an overridden loss does not make the host wait in each step."""

from pathlib import Path
from typing import Any

from tests.guarantees.drop_in.programs import UsingLoss, made
from tests.support.rehearsal import watching


def test_the_number_of_items_reaches_the_device_without_a_wait(tmp_path: Path) -> None:
    counts: list[int] = []

    class Waits:
        changes_control = False

        def on_step_end(self, *_: Any, **__: Any) -> None:
            counts.append(record.count("sync"))

    with watching() as record:
        trainer = made(UsingLoss, tmp_path, use_cpu=False, max_steps=6, logging_steps=100, callbacks=[Waits()])
        trainer.train()
    assert trainer.engine.device.type == "cuda" and len(counts) == 6
    assert counts[2:] == [counts[2]] * 4, record.summary()
