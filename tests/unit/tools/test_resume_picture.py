"""Picture of a resume: it counts equal losses, reads a log that a kill has cut, and shows the count."""

from pathlib import Path

import resume_picture
from resume_picture import Runs, draw, read_losses

STRAIGHT = {step: 5 / step for step in range(1, 301)}
KILLED = {step: loss for step, loss in STRAIGHT.items() if step <= 137}
RESUMED = {step: loss for step, loss in STRAIGHT.items() if step > 100}


def test_only_losses_with_the_same_bits_count() -> None:
    assert Runs(STRAIGHT, KILLED, RESUMED, 100).num_equal == 300
    other_repeat = {**RESUMED, 120: RESUMED[120] * (1 + 1e-15)}
    assert Runs(STRAIGHT, KILLED, other_repeat, 100).num_equal == 299
    assert Runs(STRAIGHT, {**KILLED, 120: 0.0}, RESUMED, 100).num_equal == 299
    missing = {step: loss for step, loss in RESUMED.items() if step != 200}
    assert Runs(STRAIGHT, KILLED, missing, 100).num_equal == 299


def test_log_that_a_kill_has_cut_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    lines = '{"step": 1, "loss": 5.5}\n{"step": 2, "eval_loss": 5.0}\n{"step": 3, "lo'
    (tmp_path / "trainer_logs.jsonl").write_text(lines)
    assert read_losses(tmp_path) == {1: 5.5}
    assert read_losses(tmp_path / "missing") == {}


def test_picture_states_the_number_of_equal_losses() -> None:
    figure = draw(Runs(STRAIGHT, KILLED, {**RESUMED, 120: 0.0}, 100))
    assert figure.axes[0].get_title(loc="left") == "bit-identical: 299 of 300 losses equal"
    assert resume_picture.IMAGE_PATH.is_file()
