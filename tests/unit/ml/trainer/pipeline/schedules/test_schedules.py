"""Pipeline schedules: names, accepted layouts, action tables, idle time and peak activations."""

import importlib.util
import re
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleZBVZeroBubble
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from forgather.ml.trainer.pipeline.schedules import SCHEDULES, ScheduleTraits, check_layout, find_schedule, traits_of
from forgather.ml.trainer.pipeline.schedules.timeline import (
    Slot,
    Work,
    action_table,
    bubble_share,
    peak_activations,
    timeline,
)
from tests.support.ranks import run_on_ranks

DOCS_PATH = Path(__file__).parents[6] / "docs"
NAMES = ["gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbv", "dualpipev"]
every_schedule = pytest.mark.parametrize("schedule_class", SCHEDULES, ids=lambda one: SCHEDULES[one].name)


def accepts(schedule_class: type, pp_size: int, stages_per_rank: int, n_microbatches: int) -> bool:
    try:
        check_layout(schedule_class, pp_size, stages_per_rank, n_microbatches)
    except ValueError:
        return False
    return True


# --- names and traits


def test_every_schedule_of_torch_has_a_short_name() -> None:
    assert [traits_of(find_schedule(name)).name for name in NAMES] == NAMES == [one.name for one in SCHEDULES.values()]


@every_schedule
def test_torch_names_are_accepted_in_any_case(schedule_class: type) -> None:
    name = schedule_class.__name__
    for spelling in (
        name,
        name.lower(),
        name.upper(),
        name.removeprefix("Schedule"),
        SCHEDULES[schedule_class].name.upper(),
    ):
        assert find_schedule(spelling) is schedule_class
    assert find_schedule(schedule_class) is schedule_class


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("1f1", "1f1b"), ("interleaved", "interleaved1f1b"), ("zero_bubble", "zbv"), ("gpip", "gpipe")],
)
def test_unknown_name_suggests_the_nearest_and_lists_all(wrong: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"Did you mean '{nearest}'") as error:
        find_schedule(wrong)
    assert all(repr(name) in str(error.value) for name in (wrong, *NAMES))


@pytest.mark.parametrize("wrong", [dict, 3, PipelineScheduleSingle])
def test_non_schedules_are_rejected(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"schedule=.*'gpipe'"):
        find_schedule(wrong)


def test_traits_of_each_schedule() -> None:
    traits = {name: traits_of(find_schedule(name)) for name in NAMES}
    assert [name for name in NAMES if not traits[name].is_multistage] == ["gpipe", "1f1b"]
    assert [name for name in NAMES if traits[name].stage_type == "v"] == ["zbv", "dualpipev"]
    assert [name for name in NAMES if traits[name].splits_backward] == ["interleavedzerobubble", "zbv", "dualpipev"]
    assert {name: one.default_stages_per_rank for name, one in traits.items()} == dict.fromkeys(NAMES, 2) | {
        "gpipe": 1,
        "1f1b": 1,
    }


@every_schedule
def test_backward_pass_is_split_as_the_traits_declare(schedule_class: type) -> None:
    works = {slot.work for slots in action_table(schedule_class, 4, 8) for slot in slots}
    assert (
        (Work.WEIGHT_GRADIENT in works) == (Work.INPUT_GRADIENT in works) == traits_of(schedule_class).splits_backward
    )


def test_derived_schedule_has_the_traits_and_limits_of_its_base() -> None:
    class Mine(ScheduleZBVZeroBubble):
        pass

    class Logging1F1B(Schedule1F1B):
        pass

    assert find_schedule(Mine) is Mine
    assert traits_of(Mine) == traits_of(ScheduleZBVZeroBubble)
    assert not accepts(Logging1F1B, 4, 1, 3) and accepts(Logging1F1B, 4, 1, 4)


def test_custom_schedule_gets_safe_default_traits() -> None:
    class Single(PipelineScheduleSingle):
        pass

    class Several(PipelineScheduleMulti):
        pass

    assert traits_of(Single) == ScheduleTraits(
        "Single", False, "loop", splits_backward=False, default_stages_per_rank=1
    )
    assert traits_of(Several) == ScheduleTraits(
        "Several", True, "loop", splits_backward=True, default_stages_per_rank=2
    )


# --- layouts


def torch_accepts(schedule_class: type, pp_size: int, stages_per_rank: int, n_microbatches: int) -> bool:
    """Return whether torch's constructor accepts stages of this layout; it reads only the counts."""
    num_stages = pp_size * stages_per_rank
    stages = [
        SimpleNamespace(num_stages=num_stages, group_size=pp_size, group_rank=0, submod=None)
        for _ in range(stages_per_rank)
    ]
    takes_list = traits_of(schedule_class).is_multistage or stages_per_rank > 1
    try:
        schedule_class(stages if takes_list else stages[0], n_microbatches)
    except (ValueError, AttributeError):
        return False
    return True


@every_schedule
@pytest.mark.parametrize("pp_size", [1, 2, 3, 4, 5])
def test_layout_is_accepted_exactly_if_torch_accepts_it(schedule_class: type, pp_size: int) -> None:
    # One stage per rank is the only layout that Forgather rejects and torch accepts; see the next test.
    fewest = 2 if traits_of(schedule_class).stage_type == "loop" and traits_of(schedule_class).is_multistage else 1
    layouts = [(pp_size, stages, count) for stages in range(fewest, 4) for count in range(1, 14)]
    ours = {layout: accepts(schedule_class, *layout) for layout in layouts}
    assert ours == {layout: torch_accepts(schedule_class, *layout) for layout in layouts}
    assert any(ours.values())


@pytest.mark.parametrize("name", NAMES[2:])
def test_multistage_schedules_reject_one_stage_per_rank(name: str) -> None:
    with pytest.raises(ValueError, match="Set stages_per_rank=2"):
        check_layout(find_schedule(name), 4, 1, 8)


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "n_microbatches", "advice"),
    [
        ("gpipe", 2, 8, "Set stages_per_rank=1, or choose a schedule for several stages ('interleaved1f1b',"),
        ("1f1b", 1, 3, "Set n_microbatches=4 or more"),
        ("dualpipev", 2, 7, "Set n_microbatches=8 or more"),
        ("zbv", 3, 8, "Set stages_per_rank=2"),
        ("interleaved1f1b", 2, 9, "Set n_microbatches=8 or 10;"),
        ("interleavedzerobubble", 2, 11, "Set n_microbatches=10 or 12;"),
        ("gpipe", 1, 0, "Set n_microbatches to 1 or more"),
    ],
)
def test_rejection_names_the_settings_and_the_remedy(
    name: str, stages_per_rank: int, n_microbatches: int, advice: str
) -> None:
    settings = (
        f"schedule='{name}' cannot run with n_microbatches={n_microbatches} and stages_per_rank={stages_per_rank}"
    )
    with pytest.raises(ValueError, match=re.escape(settings) + " on 4 pipeline ranks: .*" + re.escape(advice)):
        check_layout(find_schedule(name), 4, stages_per_rank, n_microbatches)


@pytest.mark.parametrize("name", ["interleaved1f1b", "interleavedzerobubble"])
def test_advised_numbers_of_microbatches_are_accepted(name: str) -> None:
    schedule_class = find_schedule(name)
    for pp_size, count in [(p, n) for p in range(1, 8) for n in range(1, 40) if not accepts(schedule_class, p, 2, n)]:
        with pytest.raises(ValueError) as error:
            check_layout(schedule_class, pp_size, 2, count)
        fewer, more = map(int, re.findall(r"Set n_microbatches=(\d+) or (\d+);", str(error.value))[0])
        assert fewer < count < more
        assert accepts(schedule_class, pp_size, 2, fewer) and accepts(schedule_class, pp_size, 2, more)


# --- what ranks compute


@every_schedule
def test_each_stage_sees_each_microbatch_once_forward_and_once_backward(schedule_class: type) -> None:
    table = action_table(schedule_class, 4, 8)
    slots = [slot for rank_slots in table for slot in rank_slots]
    num_stages = 4 * traits_of(schedule_class).default_stages_per_rank
    pairs = {(stage, microbatch) for stage in range(num_stages) for microbatch in range(8)}
    assert len(slots) == len(set(slots))
    for works in ({Work.FORWARD}, {Work.BACKWARD, Work.INPUT_GRADIENT}, {Work.BACKWARD, Work.WEIGHT_GRADIENT}):
        seen = [(slot.stage, slot.microbatch) for slot in slots if slot.work in works]
        assert len(seen) == len(pairs) and set(seen) == pairs


def test_stages_per_rank_can_be_increased() -> None:
    assert {slot.stage for slot in action_table(find_schedule("interleaved1f1b"), 2, 4, 3)[0]} == {0, 2, 4}


class NotingStage(PipelineStage):
    """Real stage that records its computations."""

    notes: list[tuple[int, str, int]]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.notes.append((self.stage_index, "forward", fwd_chunk_id))
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> Any:
        self.notes.append((self.stage_index, "backward" if full_backward else "input gradient", bwd_chunk_id))
        return super().backward_one_chunk(bwd_chunk_id, *args, full_backward=full_backward, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.notes.append((self.stage_index, "weight gradient", bwd_chunk_id))
        return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


def _train_step(name: str) -> list[tuple[int, str, int]]:
    rank, traits = dist.get_rank(), traits_of(find_schedule(name))
    num_stages = 2 * traits.default_stages_per_rank
    second = num_stages - 1 - rank if traits.stage_type == "v" else rank + 2
    indices = [rank, second][: traits.default_stages_per_rank]
    stages = [NotingStage(nn.Linear(3, 3), index, num_stages, torch.device("cpu")) for index in indices]
    notes: list[tuple[int, str, int]] = []
    for stage in stages:
        stage.notes = notes
    schedule = find_schedule(name)(stages if traits.is_multistage else stages[0], 4, loss_fn=nn.functional.mse_loss)
    inputs = (torch.ones(8, 3),) if 0 in indices else ()
    schedule.step(*inputs, target=torch.zeros(8, 3) if num_stages - 1 in indices else None)
    return notes


def _train_steps() -> list[list[tuple[int, str, int]]]:
    return [_train_step(name) for name in NAMES]


def test_action_tables_equal_a_real_training_step() -> None:
    by_rank = run_on_ranks(_train_steps, 2)
    for name, *done in zip(NAMES, *by_rank, strict=True):
        table = action_table(find_schedule(name), 2, 4)
        assert done == [[(slot.stage, str(slot.work), slot.microbatch) for slot in slots] for slots in table], name


def test_schedule_without_a_table_names_the_missing_method() -> None:
    class Silent(ScheduleGPipe):
        def _get_pipeline_order(self) -> None:
            return None

    with pytest.raises(ValueError, match=r"Silent has no table of its actions.*_get_pipeline_order"):
        action_table(Silent, 2, 4)


# --- idle time

LAYOUTS = [(pp_size, rounds * pp_size) for pp_size in (1, 2, 3, 4) for rounds in (2, 3)] + [(6, 12)]
# Number of the p - 1 idle spans that would fit into a micro-batch of a rank's work: larger is better.
DIVISIONS = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved1f1b": 2,
    "loopedbfs": 2,
    "dualpipev": 3,
    "interleavedzerobubble": 6,
    "zbv": 6,
}


@pytest.mark.parametrize("name", NAMES)
def test_idle_time_has_the_closed_form(name: str) -> None:
    """A step of d * m spans of work has p - 1 idle spans; d depends on the schedule."""
    for p, m in LAYOUTS:
        assert bubble_share(find_schedule(name), p, m) == pytest.approx((p - 1) / (DIVISIONS[name] * m + p - 1))


@pytest.mark.parametrize("stages_per_rank", [2, 3, 4])
def test_more_stages_divide_the_idle_time_of_interleaved_1f1b(stages_per_rank: int) -> None:
    share = bubble_share(find_schedule("interleaved1f1b"), 4, 8, stages_per_rank)
    assert share == pytest.approx(3 / (stages_per_rank * 8 + 3))


def test_zbv_is_optimal_from_about_twice_as_many_microbatches_as_ranks() -> None:
    zbv, interleaved = find_schedule("zbv"), find_schedule("interleavedzerobubble")
    assert bubble_share(zbv, 4, 4) > bubble_share(interleaved, 4, 4)
    assert bubble_share(zbv, 4, 6) == pytest.approx(bubble_share(interleaved, 4, 6))


@every_schedule
def test_ranks_do_all_work_one_slot_at_a_time(schedule_class: type) -> None:
    for slots in timeline(schedule_class, 4, 8):
        assert all(before.end <= after.start for before, after in pairwise(slots))
        assert sum(timed.end - timed.start for timed in slots) == 3 * 8


@every_schedule
def test_no_slot_starts_before_its_input(schedule_class: type) -> None:
    ends = {timed.slot: timed.end for slots in timeline(schedule_class, 4, 8) for timed in slots}
    for timed in (one for slots in timeline(schedule_class, 4, 8) for one in slots):
        stage, work, microbatch = timed.slot.stage, timed.slot.work, timed.slot.microbatch
        if work is Work.FORWARD:
            inputs = [Slot(stage - 1, Work.FORWARD, microbatch)]
        elif work is Work.WEIGHT_GRADIENT:
            inputs = [Slot(stage, Work.INPUT_GRADIENT, microbatch)]
        else:
            inputs = [Slot(stage + 1, one, microbatch) for one in (Work.BACKWARD, Work.INPUT_GRADIENT)]
            inputs += [Slot(stage, Work.FORWARD, microbatch)]
        assert all(ends[one] <= timed.start for one in inputs if one in ends)


def test_every_accepted_layout_terminates() -> None:
    for schedule_class in SCHEDULES:
        for layout in [(p, stages, m) for p in (1, 2, 3) for stages in (1, 2, 3) for m in range(1, 8)]:
            if accepts(schedule_class, *layout):
                pp_size, stages_per_rank, n_microbatches = layout
                assert 0 <= bubble_share(schedule_class, pp_size, n_microbatches, stages_per_rank) < 1


# --- memory


@pytest.mark.parametrize(("pp_size", "n_microbatches"), [(2, 4), (4, 8), (4, 16)])
def test_peak_activations_of_1f1b_and_gpipe(pp_size: int, n_microbatches: int) -> None:
    assert peak_activations(Schedule1F1B, pp_size, n_microbatches) == list(range(pp_size, 0, -1))
    assert peak_activations(ScheduleGPipe, pp_size, n_microbatches) == [n_microbatches] * pp_size


@pytest.mark.parametrize("n_microbatches", [8, 16, 32])
def test_peak_activations_of_other_schedules_except_loopedbfs_are_constant(n_microbatches: int) -> None:
    peaks = {name: peak_activations(find_schedule(name), 4, n_microbatches) for name in NAMES[2:]}
    assert peaks == {
        "interleaved1f1b": [5.5, 4.5, 3.5, 2.5],
        "loopedbfs": [n_microbatches] * 4,
        "interleavedzerobubble": [4] * 4,
        "zbv": [4] * 4,
        "dualpipev": [4.5] * 4,
    }


# --- drawings


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_schedules", DOCS_PATH / "draw_schedules.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def contents_of(svg_path: Path) -> tuple[list[str], list[str]]:
    """Return the ids of boxes and all texts of a drawing, which do not depend on the version of matplotlib."""
    elements = list(ElementTree.parse(svg_path).iter())
    boxes = [one.attrib["id"] for one in elements if one.attrib.get("id", "").startswith("rank")]
    return boxes, [(one.text or "").strip() for one in elements if one.tag.endswith("}text")]


@pytest.mark.parametrize("schedule_class", list(SCHEDULES)[1::2], ids=lambda one: SCHEDULES[one].name)
def test_drawing_in_the_documentation_is_up_to_date(schedule_class: type, drawing: ModuleType, tmp_path: Path) -> None:
    name = drawing.image_name(SCHEDULES[schedule_class])
    drawing.write(schedule_class, tmp_path / name)
    boxes, texts = contents_of(DOCS_PATH / "images" / name)
    assert (boxes, texts) == contents_of(tmp_path / name)
    times = timeline(schedule_class, 4, 8)
    assert boxes == [drawing.box_id(rank, timed) for rank, slots in enumerate(times) for timed in slots]
    assert any(f"{bubble_share(schedule_class, 4, 8):.1%} of the time is idle" in text for text in texts)


def test_drawings_are_reproducible_byte_for_byte(drawing: ModuleType, tmp_path: Path) -> None:
    for path in (tmp_path / "first.svg", tmp_path / "second.svg"):
        drawing.write(Schedule1F1B, path)
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()
