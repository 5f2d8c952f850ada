"""Work of `forgather replay`: replays steps, prints the report, and compares ranks."""

import argparse
import dataclasses
import logging
import os
import re
import socket
from collections.abc import Sequence

from forgather.cli.command_line import DONE, FAILED
from forgather.cli.commands.replay import VERDICT_VARIABLE
from forgather.cli.errors import UsageError
from forgather.cli.output import print_json, show_table
from forgather.cli.process_setup import show_own_messages
from forgather.cli.work.job import Job
from forgather.cli.work.samples import quoted
from forgather.ml.checkpoint.errors import CheckpointNotFoundError
from forgather.ml.distributed import Peers
from forgather.ml.trainer.callbacks.display import get_console, show_row
from forgather.tools.replay import (
    DeviceCheck,
    ModuleGradient,
    ReplayError,
    ReplayReport,
    SampleLoss,
    StepReport,
    compare_ranks,
    replay_run,
)
from forgather.tools.replay.report import badness

_NUM_ROWS = 8
_NUMBERED = re.compile(r"^(.*?\.\d+)(\..*)?$")


def show_replay(options: argparse.Namespace) -> int:
    """Replay as the command line requests, and print the result; returns the exit code."""
    show_own_messages()
    # The messages of a training run, such as the choice of the loss, are no part of the report.
    logging.getLogger("forgather").setLevel(logging.WARNING)
    if options.each_rank:
        return _compare_ranks(options)
    report = _replayed(options, keeps_digests=False)
    if options.json:
        print_json("replay/1", as_plain_data(report))
    else:
        _show(report)
    return DONE


def _replayed(options: argparse.Namespace, keeps_digests: bool) -> ReplayReport:
    try:
        return replay_run(
            options.run,
            options.step,
            options.to,
            without=options.without,
            config=options.config,
            keeps_digests=keeps_digests,
        )
    except (CheckpointNotFoundError, FileNotFoundError, ReplayError) as error:
        raise UsageError(f"{error}") from None


def _compare_ranks(options: argparse.Namespace) -> int:
    # The replay of each rank is a job of one process. The ranks meet only afterwards, to compare the results.
    report = _replayed(options, keeps_digests=True)
    with Job.joined(use_cpu=report.device == "cpu") as job:
        gathered = Peers.world().gather((report, socket.gethostname()))
    check = compare_ranks([one for one, _ in gathered], [host for _, host in gathered])
    if job.is_main:
        if options.json:
            print_json("replay.each_rank/1", {**dataclasses.asdict(check), "verdict": check.verdict})
        else:
            _show_check(report, check)
    return DONE if check.agrees else _tell_difference()


def _tell_difference() -> int:
    """Return the exit code of a worker whose job has found different gradients."""
    path = os.environ.get(VERDICT_VARIABLE)
    if path is None:
        # Started by torchrun, which has no other way to learn the result.
        return FAILED
    # Forgather's launcher would report a worker that fails. It looks for this file instead.
    with open(path, "w", encoding="utf-8") as file:
        file.write("different")
    return DONE


def as_plain_data(report: ReplayReport) -> dict[str, object]:
    """Return a report as data that JSON can represent."""
    data = dataclasses.asdict(report)
    for key in ("steps", "steps_without"):
        for step, plain in zip(getattr(report, key), data[key], strict=True):
            plain.pop("gradient_digests")
            if step.logged is not None:
                plain["logged"] |= {"is_exact": step.logged.is_exact, "difference": step.logged.difference}
    return data


# --- text


def _show(report: ReplayReport) -> None:
    start = "the beginning of the run" if report.checkpoint is None else report.checkpoint
    show_row("from", start)
    ranks = "1 process" if report.num_ranks == 1 else f"{report.num_ranks} ranks ({report.trainer})"
    show_row("run", f"{ranks}, replayed on {report.device}")
    if len(report.steps) == 1:
        _show_step(report.steps[0], report)
    else:
        _show_steps(report)
    if report.steps_without:
        _show_without(report)
    for note in report.notes:
        show_row("note", note)


def _show_step(step: StepReport, report: ReplayReport) -> None:
    if step.loss is None:
        return
    show_row("step", f"{step.step}, epoch {step.epoch}, learning rate {step.learning_rate:.3g}")
    show_row("loss", f"{_number(step.loss)} over {step.num_targets} targets")
    show_row("grad norm", _number(step.grad_norm))
    show_row("log", _compared(step))
    for label, found in (("first bad", step.first_nonfinite), ("backward", step.first_nonfinite_gradient)):
        if found is not None:
            rows = f", rows {', '.join(map(str, found.rows[:_NUM_ROWS]))}" if found.rows else ""
            kind = "output" if label == "first bad" else "gradient"
            show_row(label, f"{found.module}: NaN or infinite {kind}, micro-batch {found.micro_batch}{rows}")
    _show_samples(step.samples)
    _show_tokens(step)
    _show_gradients(step.gradients)
    _show_activations(step)


def _show_samples(samples: Sequence[SampleLoss]) -> None:
    worst = sorted(samples, key=lambda one: badness(one.loss), reverse=True)
    _title(f"samples, worst {min(_NUM_ROWS, len(worst))} of {len(worst)}")
    columns = ("index", "position", "rank", "micro-batch", "row", "loss", "targets", "source")
    rows = [
        (
            *(one.index, one.position, one.rank, one.micro_batch, one.row),
            *(_number(one.loss), one.num_targets, one.source),
        )
        for one in worst[:_NUM_ROWS]
    ]
    show_table(columns, rows, numeric=columns[:-1])


def _show_tokens(step: StepReport) -> None:
    if not step.worst_tokens:
        return
    _title("worst tokens")
    columns = ("index", "token at", "loss", "token", "model expected", "text before")
    rows = [
        (
            *(one.index, one.place, _number(one.loss)),
            *(quoted(one.token or str(one.token_id), 20), quoted(one.predicted or str(one.predicted_id), 20)),
            quoted(one.context or "", 60),
        )
        for one in step.worst_tokens[:_NUM_ROWS]
    ]
    show_table(columns, rows, numeric=columns[:3])


def _show_gradients(gradients: Sequence[ModuleGradient]) -> None:
    layers: dict[str, list[ModuleGradient]] = {}
    for one in gradients:
        layers.setdefault(layer_of(one.module), []).append(one)
    _title("gradient norms, before clipping")
    rows = [
        (
            layer,
            _number(sum(one.norm**2 for one in parts) ** 0.5),
            sum(one.num_nonfinite for one in parts) or "",
            max(parts, key=lambda one: badness(one.norm)).module,
        )
        for layer, parts in layers.items()
    ]
    show_table(("layer", "norm", "NaN or inf", "largest in"), rows, numeric=("norm", "NaN or inf"))


def _show_activations(step: StepReport) -> None:
    worst = sorted(step.activations, key=lambda one: (-one.num_nonfinite, -one.absolute_maximum))
    _title("largest activations")
    columns = ("module", "min", "max", "NaN or inf")
    rows = [
        (one.module, _number(one.minimum), _number(one.maximum), one.num_nonfinite or "") for one in worst[:_NUM_ROWS]
    ]
    show_table(columns, rows, numeric=columns[1:])


def _show_steps(report: ReplayReport) -> None:
    columns = ("step", "loss", "grad norm", "worst index", "its loss", "log", "source")
    rows = []
    for step in report.steps:
        worst = step.worst_sample
        rows.append(
            (
                *(step.step, _number(step.loss), _number(step.grad_norm)),
                *(None if worst is None else worst.index, None if worst is None else _number(worst.loss)),
                *(_compared(step), worst.source if worst else None),
            )
        )
    show_table(columns, rows, numeric=columns[:5])


def _show_without(report: ReplayReport) -> None:
    _title(f"without the samples {', '.join(map(str, report.without))} (dataset indices)")
    before = {step.step: step for step in report.steps}
    columns = ("step", "loss", "without", "grad norm", "without ")
    rows = [
        (
            *(step.step, _number(before[step.step].loss), _number(step.loss)),
            *(_number(before[step.step].grad_norm), _number(step.grad_norm)),
        )
        for step in report.steps_without
    ]
    show_table(columns, rows, numeric=columns)
    indices = ",".join(map(str, report.without))
    start = "" if report.checkpoint is None else f" --args.resume_from_checkpoint {report.checkpoint}"
    show_row("next", f"train on without them: forgather train CONFIG{start} --args.skip_samples '[{indices}]'")


def _show_check(report: ReplayReport, check: DeviceCheck) -> None:
    show_row("from", report.checkpoint or "the beginning of the run")
    show_row("step", f"{check.step}, replayed on {len(check.hosts)} ranks")
    columns = ("rank", "host", "loss", "grad norm", "")
    rows = [
        (
            *(rank, host, _exactly(check.losses[rank]), _exactly(check.grad_norms[rank])),
            "differs" if rank in check.different else "",
        )
        for rank, host in enumerate(check.hosts)
    ]
    show_table(columns, rows, numeric=("rank", "loss", "grad norm"))
    show_row("verdict", check.verdict)


def layer_of(module: str) -> str:
    """Return the layer that a module belongs to: its name up to the first number, or the full name."""
    found = _NUMBERED.match(module)
    return found.group(1) if found else module


def _compared(step: StepReport) -> str:
    if step.logged is None:
        return "no record"
    if step.logged.is_exact:
        return "the same bits"
    return f"differs by {step.logged.difference:.1e}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _exactly(value: float | None) -> str:
    return "" if value is None else repr(value)


def _title(text: str) -> None:
    get_console().print()
    get_console().print(text, style="bold", markup=False, highlight=False)
