"""Post-local SGD: evaluation, export and checkpoints use the average of the ranks' weights."""

import json
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from forgather.ml.checkpoint.errors import CheckpointLoadError
from forgather.ml.trainer.ddp.post_local_sgd import PostLocalSGD
from tests.support.data_parallel import ddp_trainer
from tests.support.ranks import run_on_ranks
from tests.support.tiny_models import TokenModel, quiet_trainer, tiny_llama, token_samples, weights

SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "per_device_train_batch_size": 2,
    "post_local_sgd": {"enabled": True, "start_step": 1, "period": 100},
}


def evaluated(output_dir: Path) -> dict[str, float]:
    """Train without evaluations, with evaluations, and with saves, and return the evaluation losses."""
    data, options = token_samples(32), {"eval_dataset": token_samples(5, seed=9)}
    plain = ddp_trainer(output_dir / "plain", TokenModel(), data, trainer_options=options, **SETTINGS)
    plain.train()
    own = weights(plain.unwrapped_model())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    assert any(not torch.equal(parts[0][name], parts[1][name]) for name in own), (
        "the ranks should have different weights"
    )

    often = ddp_trainer(
        output_dir / "often",
        TokenModel(),
        data,
        trainer_options=options,
        eval_strategy="steps",
        eval_steps=1,
        **SETTINGS,
    )
    often.train()
    assert all(torch.equal(tensor, own[name]) for name, tensor in weights(often.unwrapped_model()).items()), (
        "evaluations must not change weights"
    )
    loss = often.evaluate()["eval_loss"]
    assert loss == often.state.log_history[-2]["eval_loss"]

    average = TokenModel()
    average.load_state_dict({name: (parts[0][name] + parts[1][name]) / 2 for name in own})
    single = quiet_trainer(output_dir / "single", average, None, trainer_options=options)
    expected = single.evaluate()["eval_loss"]

    saving = {"save_strategy": "steps", "save_steps": 6, "eval_strategy": "steps", "eval_steps": 6}
    saved = ddp_trainer(output_dir / "saved", TokenModel(), data, trainer_options=options, **saving, **SETTINGS)
    saved.train()
    return {"often": loss, "expected": expected, "saved": saved.evaluate()["eval_loss"]}


def test_evaluated_weights_are_the_saved_average(tmp_path: Path) -> None:
    for losses in run_on_ranks(evaluated, 2, tmp_path):
        assert losses["often"] == pytest.approx(losses["expected"], rel=1e-6)
        assert losses["saved"] == losses["often"]
        recorded = json.loads((tmp_path / "saved/checkpoints/checkpoint-6/eval_metrics.json").read_text())
        assert recorded["eval_loss"] == losses["saved"]


def exported(output_dir: Path) -> dict[str, Any]:
    trainer = ddp_trainer(output_dir, tiny_llama(), token_samples(32), **SETTINGS)
    trainer.train()
    trainer.save_model(str(output_dir / "model"))
    return weights(trainer.unwrapped_model())


def test_averaged_weights_are_exported(tmp_path: Path) -> None:
    one, other = run_on_ranks(exported, 2, tmp_path)
    found = load_file(tmp_path / "model/model.safetensors")
    assert all(torch.equal(tensor, (one[name] + other[name]) / 2) for name, tensor in found.items())
    assert any(not torch.equal(tensor, one[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    "state",
    [
        None,
        [3, 3],
        {"averager_step": 3},
        {"averager_step": 3, "hook_step": -1},
        {"averager_step": 2.5, "hook_step": 3},
        {"averager_step": True, "hook_step": 3},
        {"averager_step": torch.tensor(3), "hook_step": 3},
    ],
)
def test_malformed_state_is_rejected_before_any_change(state: Any) -> None:
    local_sgd = PostLocalSGD.__new__(PostLocalSGD)  # Real averagers need a process group.
    local_sgd._averager, local_sgd._hook_state = types.SimpleNamespace(step=1), types.SimpleNamespace(iter=1)  # type: ignore[assignment]
    for load in (local_sgd.check_state_dict, local_sgd.load_state_dict):
        with pytest.raises(CheckpointLoadError, match=r"saved state of post_local_sgd.*components=\["):
            load(state)
    assert local_sgd.state_dict() == {"averager_step": 1, "hook_step": 1}
    local_sgd.load_state_dict({"averager_step": 4, "hook_step": 5})
    assert local_sgd.state_dict() == {"averager_step": 4, "hook_step": 5}
