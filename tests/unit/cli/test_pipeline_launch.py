"""`forgather train` with pipeline and hybrid trainers."""

from pathlib import Path

import pytest

from tests.support.launch import kill_leftovers
from tests.support.sampling import long_search
from tests.unit.cli.program import call, write_plain_run, write_tiny_run
from tests.unit.cli.test_launch import PLAIN_PROGRAM, finish, start

LAYERS = ("--model.config.num_hidden_layers", "2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_tiny_run(tmp_path)
    write_plain_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@long_search
def test_pipeline_trains_and_hybrid_resumes_its_checkpoint(folder: Path) -> None:
    try:
        output = finish(
            start(folder, *PLAIN_PROGRAM, "--trainer", "pipeline", "--nproc", "2", "--trainer.schedule", "1f1b")
        )
        assert "PlainModel" in output and "in 2 stages on 2 ranks" in output
        assert "step 5/5" in output and "eval 5/5" in output
        words = ("--trainer", "hybrid", "--nproc", "2", "--args.pp_size", "2", "--args.max_steps", "8")
        output = finish(start(folder, *PLAIN_PROGRAM, *words))
        assert "resumed at step 5" in output and "step 8/8" in output
        assert "kind: hybrid" in (folder / "out/config.yaml").read_text()
    finally:
        kill_leftovers()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--trainer.schedule", "1f1b"), "trainer.schedule is for --trainer pipeline or --trainer hybrid"),
        (("--trainer", "pipeline", "--trainer.schedule", "2f2b"), "schedule='2f2b' is not a known pipeline schedule"),
        (("--trainer", "pipeline"), "PipelineTrainer needs at least two ranks"),
        (("--trainer", "pipeline", "--args.n_microbatches", "3"), "not divisible by n_microbatches=3"),
        (("--args.n_microbatches", "3"), "It belongs to --trainer pipeline or hybrid"),
        (
            (
                "--trainer",
                "pipeline",
                "--trainer.splitter.class_path",
                "forgather.ml.trainer.pipeline.create_causal_lm_splitter",
                "--trainer.splitter.init_args",
                "{layers: 3}",
            ),
            "trainer.splitter",
        ),
    ],
)
def test_impossible_divisions_are_rejected(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    answer = call(capsys, "train", "tiny.yaml", *LAYERS, *words)
    assert answer.code != 0
    assert message in " ".join((answer.errors + answer.output).split())
