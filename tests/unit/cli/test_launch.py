"""`forgather train` in several processes: `--nproc`, torchrun, stop requests, failures and wrong options."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import psutil
import pytest

from forgather._watch.processes import start_time
from forgather.cli.launch.options import take_launch_options
from tests.support.launch import CapturedProcess, kill_leftovers
from tests.support.sampling import long_search
from tests.unit.cli.program import call, spawn, write_plain_run, write_tiny_run

PROGRAM = ("-m", "forgather.cli.main", "train", "tiny.yaml")
PLAIN_PROGRAM = (*PROGRAM[:-1], "plain.yaml")
SECONDS = 90
FAILING = """\
import os
from forgather.ml.trainer.trainer_types import TrainerCallback

class FailsOnRank1(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if os.environ["RANK"] == "1" and state.global_step == 3:
            raise ValueError("the disk of rank 1 is full")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of one run that these tests start, resume and stop, because each start takes seconds."""
    path = tmp_path_factory.mktemp("launch")
    write_tiny_run(path)
    write_plain_run(path)
    (path / "failing.py").write_text(FAILING)
    return path


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    kill_leftovers()


def start(folder: Path, *words: str) -> CapturedProcess:
    return CapturedProcess([sys.executable, *words], {"COLUMNS": "200"}, folder, name="forgather")


def finish(process: CapturedProcess, code: int = 0) -> str:
    assert process.wait(SECONDS) == code, process.output
    return process.output


@long_search
def test_nproc_starts_the_processes_and_only_one_prints(folder: Path) -> None:
    output = finish(start(folder, *PROGRAM, "--trainer", "ddp", "--nproc", "2"))
    assert "2 processes" in output
    for line in ("eval data  ", "step 1/5", "step 5/5", "eval 5/5", "saved  ", "Loss: "):
        assert output.count(line) == 1, output
    assert (folder / "out/config.yaml").read_text().count("kind: ddp") == 1
    assert (folder / "out/checkpoints/checkpoint-5/config.yaml").exists()
    assert [path.name[:7] for path in (folder / "out/tokens").iterdir()] == ["tokens-"]


@long_search
def test_torchrun_runs_the_same_command_and_the_checkpoint_moves_between_trainers(folder: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--local-addr", "127.0.0.1")
    output = finish(start(folder, *launcher, *PROGRAM, "--trainer", "accelerate", "--args.max_steps", "7"))
    assert output.count("resumed at step 5") == 1 and output.count("step 7/7") == 1
    assert (folder / "out/checkpoints/checkpoint-7").is_dir()


def test_stop_request_reaches_the_workers_which_save_and_exit_with_0(folder: Path) -> None:
    words = ("--trainer", "ddp", "--nproc=2", "--args.max_steps", "100000", "--args.eval_strategy", "no")
    process = start(folder, *PLAIN_PROGRAM, *words, "--args.save_steps", "100000", "--args.output_dir", "stopped")
    process.wait_for_output("/100000 ", SECONDS)
    os.kill(process.pid, signal.SIGTERM)
    output = finish(process)
    assert output.count("SIGTERM received") == 1 and "Traceback" not in output
    step = re.search(r"Run the same command again to resume from step ([\d,]+)", output)
    assert step is not None
    assert (folder / "stopped/checkpoints" / f"checkpoint-{step[1].replace(',', '')}").is_dir()


def test_workers_end_with_a_launcher_that_was_killed(folder: Path) -> None:
    words = ("--trainer", "ddp", "--nproc=2", "--args.max_steps", "100000", "--args.eval_strategy", "no")
    process = start(folder, *PLAIN_PROGRAM, *words, "--args.save_steps", "100000", "--args.output_dir", "killed")
    process.wait_for_output("/100000 ", SECONDS)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, process.output


ORPHAN = """
import os, subprocess, sys, time
from forgather.cli.launch.lifeline import end_with_launcher, tie_workers

if len(sys.argv) == 1:
    tie_workers()
    subprocess.Popen([sys.executable, __file__, str(os.getpid())])
else:
    while os.getppid() == int(sys.argv[1]):
        time.sleep(0.01)
    print("orphan", flush=True)
    end_with_launcher()
    print("alive", flush=True)
"""


def test_worker_ends_if_its_launcher_ended_before_the_tie(tmp_path: Path) -> None:
    (tmp_path / "orphan.py").write_text(ORPHAN)
    # Returns when the worker, too, has closed the pipe.
    done = subprocess.run([sys.executable, "orphan.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "orphan\n", done.stderr


def test_command_in_an_inherited_environment_outlives_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORGATHER_LAUNCHER_PROCESS", "999999 1")
    assert spawn(tmp_path, "--version").code == 0


def test_worker_does_not_pass_its_launcher_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGATHER_LAUNCHER_PROCESS", f"{os.getpid()} {start_time(os.getpid())}")
    program = "from forgather.cli.main import main; main(); import os; print(sorted(os.environ))"
    answer = spawn(tmp_path, "--version", program=program)
    assert answer.code == 0 and "FORGATHER_LAUNCHER_PROCESS" not in answer.output


def test_failed_worker_is_named_with_its_traceback_and_restarts_resume(folder: Path) -> None:
    words = ("--trainer", "ddp", "--nproc", "2", "--max-restarts", "1", "--args.output_dir", "failed")
    process = start(folder, *PLAIN_PROGRAM, *words, "--callbacks+", "{class_path: failing.FailsOnRank1}")
    output = finish(process, code=1)
    assert output.count('raise ValueError("the disk of rank 1 is full")') == 2, "once for each attempt"
    sentence = r"forgather: rank 1 failed.*: ValueError: the disk of rank 1 is full\."
    assert re.search(rf"{sentence} Restarting \(1 of 1\)\.\n", output)
    assert re.search(rf"{sentence}\n$", output)
    assert output.count("start      from the beginning") == 1 and output.count("resumed at step 2") == 1


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("tiny.yaml",), id="no module named"),
        pytest.param(("plain.yaml", "--trainer", "ddp", "--nproc", "2"), id="own module on two ranks"),
    ],
)
def test_libraries_are_never_imported_from_the_current_directory(tmp_path: Path, words: tuple[str, ...]) -> None:
    write_tiny_run(tmp_path)
    write_plain_run(tmp_path)
    # As an installed script: its folder is searched first, not the current directory.
    script = tmp_path / "bin" / "forgather"
    script.parent.mkdir()
    script.write_text("import sys\nfrom forgather.cli.main import main\nsys.exit(main())\n")
    installed = {name for name in packages_distributions() if name.isidentifier()}
    for name in {*sys.stdlib_module_names, *installed, "forgather", "apex", "sitecustomize", "usercustomize"}:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    output = finish(start(tmp_path, str(script), "train", *words))
    assert "step 5/5" in output
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc", "2"], "--trainer single trains in one process, but the job has 2"),
        (["--nproc", "2"], "Use --trainer ddp or --trainer fsdp2 or --trainer accelerate"),
        (["--nproc", "two"], "--nproc two: expected a whole number of 1 or more"),
        (["--nproc", "0"], "--nproc 0: expected a whole number of 1 or more"),
        (["--nproc"], "--nproc needs a value."),
        (["--nproc", "2", "--nproc", "3"], "--nproc is set twice"),
        (["--npro", "2"], "Did you mean '--nproc'?"),
        (["-d", "0,a"], "-d 0,a: expected the numbers of different devices"),
        (["-d", "0,1", "--nproc", "3"], "--nproc 3 and -d 0,1 contradict each other"),
        (["--nnodes", "2"], "--nnodes 2 also needs --node-rank and --rdzv-endpoint"),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "a:1"], "with --nnodes 2 the nodes are 0 to 1"),
        (["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "a"], "expected HOST:PORT"),
        (["--rdzv-endpoint", "a:1"], "--rdzv-endpoint is for several nodes"),
    ],
)
def test_wrong_launch_options_are_rejected_with_a_remedy(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    monkeypatch.chdir(folder)
    answer = call(capsys, "train", "tiny.yaml", *words)
    assert answer.code == 2 and message in " ".join(answer.errors.split())


@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_options_that_contradict_torchrun_are_rejected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    answer = call(capsys, "train", "tiny.yaml", "--trainer", "ddp", "--nproc", "3")
    assert answer.code == 2
    assert "--nproc 3 requests 3 process(es) per node, but torchrun or another launcher has started 2" in " ".join(
        answer.errors.split()
    )
    answer = call(capsys, "train", "tiny.yaml")
    assert answer.code == 2 and "--trainer single trains in one process, but the job has 2" in answer.errors


def test_launch_options_are_separated_from_the_others() -> None:
    words = ["my.yaml", "-d", "0,3", "--args.seed", "1", "--node_rank=1", "--nnodes", "2", "--rdzv-endpoint", "a:1"]
    options, others = take_launch_options(words)
    assert others == ["my.yaml", "--args.seed", "1"]
    assert (options.num_processes_per_node, options.devices, options.world_size) == (2, "0,3", 4)
    assert options.needs_launcher and not take_launch_options(["--nproc", "1"])[0].needs_launcher
