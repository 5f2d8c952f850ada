"""Examples for Slurm, Kubernetes and SkyPilot: they parse, agree with each other, and their scripts handle a preemption."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.test_documents import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
PROGRAM = """\
#!/bin/sh
# Stands in for forgather: notes its arguments, and behaves as a run that is preempted, complete or failed.
echo "$@" >> "$NOTES"
case $BEHAVIOUR in
    preempted) trap 'touch "$OUTPUT_DIR/preempted"; exit 0' TERM; touch "$NOTES.ready"; while :; do sleep 0.05; done ;;
    complete) exit 0 ;;
    failed) exit 3 ;;
esac
"""
BEHAVIOURS = {"preempted": 143, "complete": 0, "failed": 3}


def load(name: str) -> list[Any]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def pods_of_pytorch_job() -> list[Any]:
    (job,) = load("kubernetes/pytorchjob.yaml")
    return [spec["template"]["spec"] for spec in job["spec"]["pytorchReplicaSpecs"].values()]


def script_of_pytorch_job() -> str:
    scripts = {pod["containers"][0]["args"][0] for pod in pods_of_pytorch_job()}
    (script,) = scripts
    return str(script)


def script_of_train_job() -> str:
    return str(load("kubernetes/trainjob.yaml")[1]["spec"]["trainer"]["args"][0])


def run_script(folder: Path, script: str, behaviour: str, **variables: str) -> tuple[int, str]:
    """Run a script with a stand-in for forgather; returns its exit code and the arguments of forgather."""
    program = folder / "bin" / "forgather"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    path = os.pathsep.join((str(program.parent), os.environ["PATH"]))
    notes = folder / "notes"
    variables |= {"PATH": path, "OUTPUT_DIR": str(folder), "NOTES": str(notes), "BEHAVIOUR": behaviour}
    process = subprocess.Popen(["sh", "-c", script], env={**os.environ, **variables})
    if behaviour == "preempted":
        while not Path(f"{notes}.ready").exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
    return process.wait(30), notes.read_text()


def test_pods_of_a_pytorch_job_are_equal_and_have_time_to_save() -> None:
    (job,) = load("kubernetes/pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    first, second = pods_of_pytorch_job()
    assert first == second and first["terminationGracePeriodSeconds"] >= 120
    assert first["containers"][0]["name"] == "pytorch"
    assert job["spec"]["nprocPerNode"] == str(first["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])


def test_train_job_names_its_runtime_and_has_time_to_save() -> None:
    runtime, job = load("kubernetes/trainjob.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"]["kind"] == runtime["kind"]
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= 120 and pod["containers"][0]["name"] == "node"
    assert job["spec"]["trainer"]["numProcPerNode"] == runtime["spec"]["mlPolicy"]["torch"]["numProcPerNode"]


def test_both_kinds_of_jobs_run_the_same_script() -> None:
    assert script_of_pytorch_job() == script_of_train_job()


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_pod_passes_the_signal_on_and_reports_a_preemption(tmp_path: Path, behaviour: str) -> None:
    code, words = run_script(tmp_path, script_of_train_job(), behaviour, CONFIG="my.yaml")
    assert code == BEHAVIOURS[behaviour]
    assert words == f"train my.yaml --trainer ddp --args.output_dir {tmp_path}\n"


@pytest.mark.parametrize("behaviour", ["complete", "failed"])
def test_sky_pilot_starts_one_launcher_per_machine(tmp_path: Path, behaviour: str) -> None:
    (task,) = load("skypilot.yaml")
    assert task["num_nodes"] == 2 and task["resources"]["use_spot"]
    variables = {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    variables |= {"CONFIG": "my.yaml", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    code, words = run_script(tmp_path, task["run"], behaviour, **variables)
    assert code == BEHAVIOURS[behaviour]
    assert words.endswith("--nproc 8 --nnodes 2 --node-rank 1 --rdzv-endpoint 10.0.0.1:29400\n")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("code", "is_marked"), [(0, True), (0, False), (3, True)])
def test_batch_script_queues_a_preempted_job_again(tmp_path: Path, code: int, is_marked: bool) -> None:
    for name, line in (("srun", f"exit {code}"), ("scontrol", 'echo "$@" > queued')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    if is_marked:
        (tmp_path / "preempted").touch()
    path = os.pathsep.join((str(tmp_path), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "OUTPUT_DIR": ".", "SLURM_JOB_ID": "7"}
    script = EXAMPLES / "slurm.sub"
    done = subprocess.run(["bash", str(script), "my.yaml"], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == code
    queued = tmp_path / "queued"
    assert queued.exists() == (code == 0 and is_marked)
    assert not queued.exists() or queued.read_text() == "requeue 7\n"


def test_batch_script_asks_for_a_signal_and_may_be_queued_again() -> None:
    lines = (EXAMPLES / "slurm.sub").read_text().splitlines()
    assert {"#SBATCH --signal=USR1@120", "#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(lines)
