"""Scripts and styles under torchrun with two ranks give the metrics of one rank: each sample counts once, in its order."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from tests.guarantees.drop_in_scripts.script_runs import OURS, THEIRS, Runs, ScriptResult, write_program
from tests.guarantees.drop_in_scripts.styles import STYLES
from tests.guarantees.drop_in_scripts.styles.recipes import run_recipe
from tests.support.sampling import long_search, sampled
from tests.support.warm_torchrun import WarmJob, run_warm_torchrun

TOLERANCE = 1e-5
RANK_JOB = "tests.guarantees.drop_in_scripts.rank_job"
# Labels of unequal number, predictions that must be in the order of the features, and generated texts.
PROGRAMS = sampled(("run_ner", "run_qa", "run_summarization"), ("run_qa",))
RANK_STYLES = ("weighted_loss_of_items", "two_heads", "own_sampler", "own_training_step", "undecayed_names")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def jobs(folder: Path) -> Mapping[str, WarmJob]:
    """Run all jobs at once."""
    commands = {program: halved(program, OURS, folder / program) for program in PROGRAMS}
    commands["styles"] = ["--styles", OURS, str(folder), *RANK_STYLES]
    return run_jobs(commands)


def halved(program: str, module: str, folder: Path) -> list[str]:
    """Write a script with half of the batch on each rank, and return its command line."""
    return write_program(program, module, folder, per_device_train_batch_size=2, per_device_eval_batch_size=2)


def run_jobs(commands: Mapping[str, Sequence[str]]) -> Mapping[str, WarmJob]:
    with pytest.MonkeyPatch.context() as patch:
        # The allocator of pyarrow starts a thread, and a process with threads must not be forked.
        patch.setenv("JE_ARROW_MALLOC_CONF", "background_thread:false")
        patch.setenv("OMP_NUM_THREADS", "1")
        return run_warm_torchrun(RANK_JOB, commands, nproc_per_node=2, timeout=400)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_script_on_two_ranks_gives_the_results_of_one(
    program: str, jobs: Mapping[str, WarmJob], folder: Path, runs: Runs
) -> None:
    assert jobs[program].agents[0].returncode == 0, jobs[program].agents[0].output
    one, two = runs.ours(program), ScriptResult(folder / program / "output")
    assert two.losses == pytest.approx(one.losses, rel=TOLERANCE)
    # Smaller batches are padded to shorter lengths, so they have fewer tokens.
    padded = {"total_tokens", "total_flops"}
    wanted = {name: value for name, value in one.metrics.items() if name not in padded}
    assert {name: two.metrics[name] for name in wanted} == pytest.approx(wanted, rel=TOLERANCE)
    for path in one.output_dir.glob("*predict*.*"):
        if path.name != "predict_results.json":
            assert two.text(path.name) == path.read_text(), path.name


@pytest.mark.parametrize("name", RANK_STYLES)
def test_a_style_on_two_ranks_gives_the_results_of_one(
    name: str, jobs: Mapping[str, WarmJob], folder: Path, tmp_path: Path
) -> None:
    assert jobs["styles"].agents[0].returncode == 0, jobs["styles"].agents[0].output
    one = run_recipe(STYLES[name], OURS, tmp_path)
    losses, metrics, weights = torch.load(folder / f"{name}.pt")
    assert losses == pytest.approx(one.losses, rel=TOLERANCE)
    assert metrics == pytest.approx(one.metrics, rel=TOLERANCE)
    for parameter, weight in one.weights.items():
        torch.testing.assert_close(weights[parameter], weight, rtol=1e-4, atol=TOLERANCE)


@long_search
def test_transformers_on_two_ranks_gives_other_results_than_on_one(runs: Runs, tmp_path: Path) -> None:
    """Show why ours differ: the same scripts with transformers train with another loss, and count samples twice."""
    jobs = run_jobs({program: halved(program, THEIRS, tmp_path / program) for program in PROGRAMS})
    assert all(job.agents[0].returncode == 0 for job in jobs.values())
    for program in ("run_ner", "run_summarization"):
        one, two = runs.theirs(program), ScriptResult(tmp_path / program / "output")
        # These models ignore num_items_in_batch, but transformers multiplies their loss by the number of ranks.
        assert two.losses[0] == pytest.approx(2 * one.losses[0], rel=0.05)
    # Its Seq2SeqTrainer keeps the samples that fill up the last batch of all ranks: 8 instead of 7.
    lengths = ScriptResult(tmp_path / "run_summarization" / "output").metrics["eval_gen_len"]
    assert float(lengths * 8).is_integer() and not float(lengths * 7).is_integer()
