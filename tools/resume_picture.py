"""Picture of an exact resume: the loss of a run that is killed and started again, over an uninterrupted run.

`python tools/resume_picture.py` trains three times (straight; until a real SIGKILL; from the checkpoint on), compares
all logged losses, and draws them to docs/images/resume.png. It fails if a loss differs.
"""

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

IMAGE_PATH = Path(__file__).parents[1] / "docs" / "images" / "resume.png"
NUM_STEPS, SAVE_STEPS, KILL_STEP = 300, 50, 137
ZOOM = (88, 152)
STRAIGHT, KILLED, RESUMED, MARK = "#c9ced6", "#1f6fd6", "#e07b00", "#c01c28"
SHADE = "#f6f4ec"

Losses = dict[int, float]


@dataclass(frozen=True)
class Runs:
    """Losses by step of the three runs, and the step of the checkpoint that the last one started from."""

    straight: Losses
    killed: Losses
    resumed: Losses
    checkpoint_step: int

    @property
    def num_equal(self) -> int:
        """Number of steps whose loss has the same bits as in the straight run, in every run that logged the step."""
        return sum(all(run.get(step, loss) == loss for run in (self.killed, self.resumed)) for step, loss in self.pairs)

    @property
    def pairs(self) -> list[tuple[int, float]]:
        """Steps and losses of the straight run that the interrupted run has too."""
        return [(step, loss) for step, loss in self.straight.items() if step in self.killed or step in self.resumed]


def main() -> None:
    """Train, compare and draw; with a folder as argument, only train in it."""
    if len(sys.argv) > 1:
        train(sys.argv[1])
        return
    with tempfile.TemporaryDirectory() as folder:
        runs = measure(Path(folder))
    if not len(runs.pairs) == runs.num_equal == NUM_STEPS:
        sys.exit(f"only {runs.num_equal} of {NUM_STEPS} losses are equal ({len(runs.pairs)} were logged)")
    write(draw(runs))
    print(f"{runs.num_equal} of {NUM_STEPS} losses are equal; killed at step {max(runs.killed)}, {IMAGE_PATH}")


def train(output_dir: str) -> None:
    """Train a small Llama with dropout, and log every step. Resumes if `output_dir` contains a checkpoint."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from forgather import Trainer, TrainingArguments
    from forgather.data.byte_tokenizer import byte_tokenizer
    from forgather.data.packed import PackedTokens
    from forgather.data.standard_library import standard_library_documents
    from forgather.data.token_store import EvaluationShare, tokenize

    tokenizer = byte_tokenizer()
    text = tokenize(standard_library_documents(4_000_000), tokenizer, EvaluationShare(0.0))["train"]
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    args = TrainingArguments(
        output_dir=output_dir,
        max_steps=NUM_STEPS,
        save_steps=SAVE_STEPS,
        logging_steps=1,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=10,
        max_grad_norm=1.0,
        use_cpu=True,
        seed=1,
    )
    trainer = Trainer(
        args=args,
        model_init=lambda: LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), attention_dropout=0.1, **sizes)),
        train_dataset=PackedTokens(text.tokens, text.document_starts, 64),
    )
    trainer.train()


def measure(folder: Path) -> Runs:
    """Run all three trainings. The killed process and the resumed one share an output directory."""
    straight, interrupted = folder / "straight", folder / "interrupted"
    wait_for(start(straight))
    kill_after(start(interrupted), interrupted, KILL_STEP)
    killed = read_losses(interrupted)
    wait_for(start(interrupted))
    # The log file of the resumed run continues the file of the killed run. The checkpoint tells where.
    checkpoint_step = max(killed) // SAVE_STEPS * SAVE_STEPS
    after = {step: loss for step, loss in read_losses(interrupted).items() if step > checkpoint_step}
    return Runs(read_losses(straight), killed, after, checkpoint_step)


def start(output_dir: Path) -> subprocess.Popen[bytes]:
    """Start the training in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, __file__, str(output_dir)], env=environment, stdout=subprocess.DEVNULL)


def wait_for(process: subprocess.Popen[bytes]) -> None:
    if process.wait() != 0:
        sys.exit(f"the training exited with code {process.returncode}")


def kill_after(process: subprocess.Popen[bytes], output_dir: Path, step: int) -> None:
    """Send SIGKILL once the run has logged `step`."""
    while step not in read_losses(output_dir):
        if process.poll() is not None:
            sys.exit(f"the training ended before step {step}, with exit code {process.returncode}")
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def read_losses(output_dir: Path) -> Losses:
    """Return the losses in the log file of a run, which a kill may have cut in its last line."""
    path = output_dir / "trainer_logs.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def write(figure: Figure) -> None:
    """Write the figure with few colours, which makes the file four times smaller."""
    drawing = io.BytesIO()
    figure.savefig(drawing, dpi=160, facecolor="white")
    Image.open(drawing).convert("RGB").quantize(64).save(IMAGE_PATH, optimize=True)


def draw(runs: Runs) -> Figure:
    """Return the figure: all steps, and a closer look at the steps around the kill."""
    figure = Figure(figsize=(9, 4.4), layout="constrained")
    axes = figure.add_subplot()
    draw_losses(axes, runs)
    axes.set_xlim(0, NUM_STEPS + 3)
    axes.set_ylim(bottom=min(runs.straight.values()) - 0.15)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9.5)
    axes.set_title(
        f"bit-identical: {runs.num_equal} of {len(runs.straight)} losses equal", fontsize=13, weight="bold", loc="left"
    )
    draw_zoom(axes, runs)
    return figure


def draw_losses(axes: Axes, runs: Runs) -> None:
    """Draw the straight run as a wide band, and the killed and the resumed run as thin lines on it."""
    kill_step = max(runs.killed)
    axes.plot(*columns(runs.straight), color=STRAIGHT, linewidth=5, label="run without interruption")
    axes.plot(*columns(runs.killed), color=KILLED, linewidth=1.6, label="run until SIGKILL")
    label = f"started again, from the checkpoint of step {runs.checkpoint_step}"
    axes.plot(*columns(runs.resumed), color=RESUMED, linewidth=1.6, label=label)
    axes.plot(kill_step, runs.killed[kill_step], "X", color=MARK, markersize=10, zorder=5)


def draw_zoom(axes: Axes, runs: Runs) -> None:
    """Draw the steps around the kill in the empty corner, with the repeated steps as dots of the killed run."""
    inset = axes.inset_axes((0.4, 0.42, 0.59, 0.56))
    draw_losses(inset, runs)
    repeated = {step: loss for step, loss in runs.killed.items() if step > runs.checkpoint_step}
    inset.plot(*columns(repeated), "o", color=KILLED, markersize=3.5, zorder=4)
    shown = [loss for step, loss in runs.straight.items() if ZOOM[0] <= step <= ZOOM[1]]
    low, high = min(shown), max(shown)
    inset.set_xlim(*ZOOM)
    inset.set_ylim(low - 0.25 * (high - low), high + 0.35 * (high - low))
    kill_step = max(runs.killed)
    inset.axvline(kill_step, color=MARK, linewidth=1, linestyle="--")
    inset.axvline(runs.checkpoint_step, color="#555555", linewidth=1, linestyle="--")
    place = inset.get_xaxis_transform()
    inset.text(kill_step + 0.7, 0.96, "SIGKILL", color=MARK, transform=place, va="top", weight="bold", fontsize=9.5)
    inset.text(runs.checkpoint_step + 0.7, 0.96, "checkpoint", transform=place, va="top", fontsize=9.5)
    middle = (runs.checkpoint_step + kill_step) / 2
    inset.text(middle, 0.03, "repeated steps: same losses", transform=place, ha="center", fontsize=9)
    inset.tick_params(labelsize=8)
    # The same shade marks the enlarged steps. Connecting lines would cross the losses.
    axes.axvspan(*ZOOM, ymax=0.38, color=SHADE, zorder=0)
    inset.set_facecolor(SHADE)


def columns(losses: Losses) -> tuple[list[int], list[float]]:
    return list(losses), list(losses.values())


if __name__ == "__main__":
    main()
