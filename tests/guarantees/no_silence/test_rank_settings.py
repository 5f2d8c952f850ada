"""Settings of ranks: a distributed trainer, equal arguments on all ranks, and consistent launcher variables."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forgather.ml.distributed import StaticDistributedEnvironment
from forgather.ml.trainer.arguments.training_arguments import TrainingArguments
from forgather.ml.trainer.ddp.ddp_arguments import DDPTrainingArguments
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.hybrid import HybridTrainer
from forgather.ml.trainer.hybrid.hybrid_arguments import HybridTrainingArguments
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.setup.rank_settings import MAY_DIFFER, argument_settings, described
from forgather.ml.trainer.trainer import Trainer
from tests.support.data_parallel import environment
from tests.support.launch import run_torchrun
from tests.support.pipelines import llama
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import TokenModel, quiet_trainer, token_samples

PLAIN_SCRIPT = """
import torch
from forgather.ml.trainer.trainer import Trainer

samples = [{"input": torch.randn(4), "labels": torch.tensor(1)} for _ in range(8)]
trainer = Trainer(
    args={"output_dir": "run", "max_steps": 2, "use_cpu": True}, model_init=lambda: torch.nn.Linear(4, 2),
    train_dataset=samples, compute_loss_func=torch.nn.functional.cross_entropy, callbacks=[],
)
trainer.train()
print("trained")
"""


@dataclass(kw_only=True)
class ArgumentsWithOwnField(DDPTrainingArguments):
    shard: int = 0


def error_of(trainer: Trainer, call: str = "train", **options: Any) -> str:
    with pytest.raises(ValueError, match="different settings") as caught:
        getattr(trainer, call)(**options)
    return str(caught.value)


# Setting -> values on rank 0 and rank 1. Each difference once caused a hang or different results on the ranks.
CASES: dict[str, tuple[Any, Any]] = {
    "max_steps": (2, 3),
    "gradient_accumulation_steps": (1, 2),
    "save_steps": (1, 5),
    "logging_steps": (1, 2),
    "seed": (1, -1),
    "eval_strategy": ("steps", "no"),
    "dispatch_batches": (True, False),
    "ddp.broadcast_buffers": (True, False),
    "weight_decay": (0.1, 0.2),
    "skip_checkpoint_components": (["rng"], []),
}


def differing_arguments(directory: Path) -> dict[str, str]:
    """Return one error for each case, and one for all cases together."""
    rank, errors = dist.get_rank(), {}
    for name, values in CASES.items():
        errors[name] = error_of(_ddp(directory / name, _nested({name: values[rank]})))
    together = {name: values[rank] for name, values in CASES.items()}
    errors["all"] = error_of(_ddp(directory / "all", _nested(together)))
    return errors


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        group, _, inner = name.rpartition(".")
        nested.update({group: {inner: value}} if group else {name: value})
    return nested


def _ddp(directory: Path, settings: dict[str, Any], **options: Any) -> Trainer:
    trainer_options = {"distributed_env": environment(), "eval_dataset": token_samples(2), **options}
    return quiet_trainer(
        directory,
        TokenModel(),
        token_samples(6),
        trainer_class=DDPTrainer,
        trainer_options=trainer_options,
        **{"max_steps": 2, **settings},
    )


def test_arguments_that_differ_between_ranks_are_rejected(tmp_path: Path) -> None:
    first, second = run_on_ranks(differing_arguments, 2, tmp_path)
    assert first == second
    for name, (one, other) in CASES.items():
        expected = f"  {name}: {described(one)} on rank 0; {described(other)} on rank 1\n"
        assert expected in first[name] and expected in first["all"], first[name]
        if name != "dispatch_batches":
            assert first[name].count(" on rank 0; ") == 1, "nothing else differs"


def differing_objects(directory: Path) -> dict[str, str]:
    rank, errors = dist.get_rank(), {}
    evaluated = None if rank else token_samples(2)
    errors["eval_dataset"] = error_of(_ddp(directory / "eval", {}, eval_dataset=evaluated))
    errors["resume"] = error_of(_ddp(directory / "resume", {}), resume_from_checkpoint=rank == 0)
    errors["call"] = error_of(_ddp(directory / "call", {}), "train" if rank else "evaluate")
    stream = torch.utils.data.DataLoader(token_samples(6), batch_size=2)  # type: ignore[arg-type]
    unlike = _ddp(directory / "kind", {"dispatch_batches": False})
    unlike.train_dataset = stream if rank else unlike.train_dataset
    errors["kind"] = error_of(unlike)
    options: dict[str, Any] = {"distributed_env": environment(), "model_init": llama}
    pipeline = quiet_trainer(
        directory / "class",
        None,
        token_samples(8),
        trainer_class=PipelineTrainer if rank else HybridTrainer,
        trainer_options=options if rank else {**options, "pipe_schedule_factory": "1f1b"},
        per_device_train_batch_size=4,
        **({} if rank else {"pp_size": 2}),
    )
    errors["class"] = error_of(pipeline)
    return errors


def test_other_inputs_that_affect_collectives_are_compared(tmp_path: Path) -> None:
    first, second = run_on_ranks(differing_objects, 2, tmp_path)
    assert first == second
    assert "  eval_dataset: given on rank 0; None on rank 1\n" in first["eval_dataset"]
    assert "  resume_from_checkpoint: True on rank 0; False on rank 1\n" in first["resume"]
    assert "  prepared for: evaluation on rank 0; training on rank 1\n" in first["call"]
    assert "  kind of train_dataset: map on rank 0; loader on rank 1\n" in first["kind"]
    assert "  class of the trainer: HybridTrainer on rank 0; PipelineTrainer on rank 1\n" in first["class"]
    assert "  schedule: 1f1b on rank 0; gpipe on rank 1\n" in first["class"]
    assert "  pp_size: 2 on rank 0; (no such setting) on rank 1\n" in first["class"]


def allowed_differences(directory: Path) -> int:
    rank = dist.get_rank()
    args = ArgumentsWithOwnField(
        output_dir=str(directory / "run"),
        logging_dir=str(directory / str(rank)),
        run_name=f"rank {rank}",
        dataloader_num_workers=0,
        gc_threshold=0.5 + rank / 10,
        shard=rank,
        max_steps=1,
        seed=1,
        use_cpu=True,
        per_device_train_batch_size=2,
    )
    trainer = DDPTrainer(
        args=args,
        model=TokenModel(),
        train_dataset=token_samples(4),
        distributed_env=environment(),
        callbacks=[] if rank else None,
    )
    return trainer.train().global_step


def test_rank_local_settings_may_differ(tmp_path: Path) -> None:
    assert run_on_ranks(allowed_differences, 2, tmp_path) == [1, 1]


def test_settings_that_may_differ_exist_and_have_a_reason() -> None:
    names = {field.name for cls in (DDPTrainingArguments, HybridTrainingArguments) for field in dataclasses.fields(cls)}
    assert MAY_DIFFER.keys() <= names
    assert all(MAY_DIFFER.values())


def test_compared_settings_contain_no_memory_addresses() -> None:
    args = TrainingArguments(output_dir="here", lr_scheduler_kwargs={"f": print, "b": object(), "a": [1, None]})
    settings = argument_settings(args)
    assert settings["lr_scheduler_kwargs"] == "{a: [1, None], b: builtins.object, f: builtins.print}"
    assert settings["output_dir"] == "'here'"
    assert not any(re.search("0x[0-9a-f]{6}", value) for value in settings.values())
    nodes = argument_settings(TrainingArguments(output_dir="here", save_on_each_node=True))
    assert "output_dir" not in nodes, "nodes have separate storage"


def test_plain_trainer_under_a_launcher_is_rejected(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PLAIN_SCRIPT)
    (agent,) = run_torchrun([str(script)], nproc_per_node=2)
    assert agent.returncode != 0
    assert "trained" not in agent.output
    assert "Trainer trains on one device, but this process is one of 2 (WORLD_SIZE): each" in agent.output
    for name in ("DDPTrainer", "AccelTrainer", "PipelineTrainer", "HybridTrainer"):
        assert name in agent.output


class OwnRanks(Trainer):
    handles_ranks = True


class OwnWrapper(Trainer):
    def _wrap(self) -> None:
        self._forward_model = self.unwrapped_model()


def plain_in_a_group(directory: Path) -> list[str]:
    found = []
    for number, env in enumerate((environment(), StaticDistributedEnvironment())):
        options = {"distributed_env": env}
        trainer = quiet_trainer(directory / str(number), TokenModel(), token_samples(4), trainer_options=options)
        with pytest.raises(ValueError, match="trains on one device") as caught:
            trainer.train()
        found.append(str(caught.value))
    for trainer_class in (OwnRanks, OwnWrapper):
        trainer = quiet_trainer(
            directory / trainer_class.__name__,
            TokenModel(),
            token_samples(4),
            trainer_class=trainer_class,
            trainer_options={"distributed_env": environment()},
            max_steps=1,
        )
        assert trainer.train().global_step == 1
    return found


def test_subclass_may_handle_ranks_itself(tmp_path: Path) -> None:
    for given, initialised in run_on_ranks(plain_in_a_group, 2, tmp_path):
        assert "one of 2 (distributed_env):" in given
        assert "one of 2 (torch.distributed):" in initialised


def test_launcher_variables_apply_unless_distributed_env_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples: list[Any] = token_samples(4)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert quiet_trainer(tmp_path / "one", TokenModel(), samples, max_steps=1).train().global_step == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match=r"Trainer trains on one device.*one of 2 \(WORLD_SIZE.*DDPTrainer"):
        quiet_trainer(tmp_path / "two", TokenModel(), samples, max_steps=1).train()
    assert not (tmp_path / "two").exists()
    alone = {"distributed_env": StaticDistributedEnvironment(), "eval_dataset": samples}
    child = quiet_trainer(tmp_path / "alone", TokenModel(), samples, trainer_options=alone, max_steps=1)
    assert child.evaluate()["eval_loss"] > 0
    assert child.train().global_step == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 does not exist among 2 process(es)"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1 does not exist among 2 process(es)"),
        ({"RANK": "1"}, "rank 1 does not exist among 1 process(es)"),
        ({"WORLD_SIZE": "2"}, "one of 2, but RANK is not set: all of them would be rank 0"),
        ({"WORLD_SIZE": "0"}, "rank 0 of 0 process(es) is impossible"),
        ({"WORLD_SIZE": "two"}, "environment variable WORLD_SIZE is 'two', but must be an integer"),
        ({"RANK": "1.0", "WORLD_SIZE": "2"}, "environment variable RANK is '1.0', but must be an integer"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "local rank 1 does not exist"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, "a node cannot have 4 processes of a job of 2"),
    ],
)
@pytest.mark.parametrize("trainer_class", [Trainer, DDPTrainer])
def test_contradictory_launcher_variables_are_rejected(
    variables: dict[str, str],
    message: str,
    trainer_class: type[Trainer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    trainer = quiet_trainer(tmp_path / "run", TokenModel(), token_samples(4), trainer_class=trainer_class)
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        trainer.train()
    if "an integer" not in message:
        found = ", ".join(f"{name}={value}" for name, value in variables.items() if name == "RANK")
        assert found in str(caught.value) and "torchrun" in str(caught.value)
