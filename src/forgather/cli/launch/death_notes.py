"""Death notes: failures.jsonl entries for workers that died without a Python error, such as by the OOM killer.

The step comes from the progress that the worker kept for its launcher. A worker that had not begun to train is not
noted. The agent calls it when workers have failed.
"""

import signal

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from forgather._watch.watcher import EXIT_CODE
from forgather.cli.launch.root_cause import hang_of, is_silent
from forgather.cli.launch.run_notes import read_progress


def note_deaths(worker_group: WorkerGroup, result: RunResult) -> None:
    """Note each worker of this node that died without a Python error."""
    for worker in worker_group.workers:
        failure = result.failures.get(worker.global_rank)
        progress = read_progress(worker.local_rank) if failure is not None and is_silent(failure) else {}
        if failure is None or not {"attempt", "step", "output_dir"} <= set(progress):
            continue
        # Imported here, because most jobs never fail.
        from forgather.ml.trainer.elastic.failure_notes import failure_of, note_failure

        kind, message = _cause(failure)
        note_failure(str(progress["output_dir"]), failure_of(progress, worker.global_rank, kind, message))


def _cause(failure: ProcessFailure) -> tuple[str, str]:
    if (hang := hang_of(failure)) is not None:
        return "RankHang", hang
    if failure.exitcode == -signal.SIGKILL:
        return "SIGKILL", "The process was killed. The system does this when it runs out of memory."
    if failure.exitcode < 0:
        return failure.signal_name(), "The process was ended by a signal."
    if failure.exitcode == EXIT_CODE:
        return "RankHang", f"The watch over ranks ended the process with exit code {EXIT_CODE}."
    return f"ExitCode{failure.exitcode}", f"The process exited with code {failure.exitcode} without an error message."
