"""Copies between host and rehearsal device: pinned, overlapped, and no more than needed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forgather.ml.checkpoint.encoding import staging
from forgather.ml.checkpoint.encoding.digest import state_digests
from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.loading.copy_streams import copy_stream
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.recipes.activation_offloading import OffloadedActivations
from forgather.ml.trainer.setup.devices import moved
from forgather.ml.trainer.trainer import Trainer
from tests.support.pipelines import llama
from tests.support.ranks import run_on_ranks
from tests.support.rehearsal import watching
from tests.support.rehearsed_runs import MAX_STEPS, Rehearsed, rehearse, samples
from tests.support.tiny_models import quiet_trainer, tiny_llama, weights


def _dispatched(path: str) -> list[Rehearsed]:
    return [
        rehearse(f"{path}/ddp", DDPTrainer, {"model_init": tiny_llama}, dispatch_batches=True),
        rehearse(f"{path}/pipeline", PipelineTrainer, {"model_init": llama}, n_microbatches=4, data=samples("ones")),
    ]


def test_all_ranks_copy_dispatched_batches_from_pinned_memory(tmp_path: Path) -> None:
    for data_parallel, pipeline in run_on_ranks(_dispatched, 2, str(tmp_path)):
        # Two tensors in each batch, and one trial run on the first batch.
        assert data_parallel.copies("h2d", "non_blocking from pinned", "devices.py") == 2 * MAX_STEPS + 2
        # The first stage reads the ids, and the last stage the labels. Both need the mask.
        assert pipeline.copies("h2d", "non_blocking from pinned", "devices.py") >= 2 * MAX_STEPS
        for run in (data_parallel, pipeline):
            assert run.copies("h2d", "pageable", "devices.py") == 0


def test_batches_are_copied_on_a_separate_stream() -> None:
    device = torch.device("cuda", 0)
    batch = {"ids": torch.arange(6).pin_memory(), "nested": [torch.ones(2).pin_memory()]}
    with watching() as record:
        result = moved(batch, device)
        used = result["ids"] + 1
        # Without `record_stream`, the device reports memory that is freed while the compute stream may use it.
        del result
    assert (record.count("sync"), record.count("hazard")) == (0, 0)
    assert torch.equal(used.cpu(), batch["ids"] + 1)
    compute = torch.accelerator.current_stream(device).stream_id
    assert compute != copy_stream(device, "batches").stream_id


def _gradients(model: nn.Module, inputs: torch.Tensor, offloads: bool) -> list[torch.Tensor]:
    model.zero_grad()
    if offloads:
        with OffloadedActivations(model.parameters()):
            output = model(inputs)
    else:
        output = model(inputs)
    output.square().mean().backward()
    return [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]


def test_offloaded_activations_return_from_pinned_memory_without_a_wait() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
    model, inputs = nn.Sequential(*layers).to("cuda"), torch.randn(64, 64).to("cuda")
    expected = _gradients(model, inputs, offloads=False)
    with watching() as record:
        model.zero_grad()
        with OffloadedActivations(model.parameters()):
            output = model(inputs)
        left = record.count("d2h")
        output.square().mean().backward()
    assert left >= 12
    assert record.count("h2d") == left
    assert all("pinned" in name for kind, name, _ in record.summary() if kind in ("h2d", "d2h"))
    assert record.count("sync") == record.count("hazard") == 0
    assert all(torch.equal(one, other) for one, other in zip(_gradients(model, inputs, True), expected, strict=True))


def test_a_graph_without_a_backward_pass_frees_its_copies() -> None:
    model, inputs = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1)).to("cuda"), torch.ones(64, 64)
    with watching() as record:
        with OffloadedActivations(model.parameters()):
            outputs = model(inputs.to("cuda"))
        # The gradient of the last layer copies earlier activations back, which nothing uses.
        torch.autograd.grad(outputs.sum(), model[2].weight)
        del outputs
        torch.accelerator.synchronize()
    assert record.count("hazard") == 0


def _saved(path: str) -> Rehearsed:
    return rehearse(path, DDPTrainer, {"model_init": tiny_llama}, save_strategy="steps", save_steps=MAX_STEPS)


def test_a_save_copies_each_tensor_once_on_each_rank(tmp_path: Path) -> None:
    # Weights, both moments and the step of each parameter. Ranks that do not write compute digests of them.
    number = 4 * len(list(tiny_llama().parameters()))
    one_device = rehearse(
        tmp_path / "one", Trainer, {"model_init": tiny_llama}, save_strategy="steps", save_steps=MAX_STEPS
    )
    for run in (one_device, *run_on_ranks(_saved, 2, str(tmp_path / "ddp"))):
        assert run.copies("d2h", "non_blocking to pinned", "checkpoint/") == number
        assert run.copies("d2h", "", "checkpoint/") == number
        assert run.hazards == 0


def test_a_run_resumes_exactly_from_a_staged_checkpoint(tmp_path: Path) -> None:
    def train(name: str, **settings: Any) -> dict[str, torch.Tensor]:
        options = {"model_init": tiny_llama, "optimizer_cls_and_kwargs": None}
        trainer = quiet_trainer(tmp_path / name, None, samples(), trainer_options=options, use_cpu=False, **settings)
        trainer.train()
        return weights(trainer.unwrapped_model())

    whole = train("whole", max_steps=6)
    train("parts", max_steps=3, save_strategy="steps", save_steps=3)
    resumed = train("parts", max_steps=6, resume_from_checkpoint=True)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_staged_state_has_the_same_digests_and_memory_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "CHUNK_BYTES", 64)
    table = torch.randn(9, 7)
    dense = {
        "table": table,
        "tied": table,
        "flat": table.view(-1),
        "halves": [torch.randn(5).bfloat16(), torch.arange(40), torch.tensor(3.0), torch.ones(0)],
        "strided": torch.randn(6, 8).t(),
        "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
        "number": 1,
    }
    state = {name: moved(value, torch.device("cuda")) for name, value in dense.items()}
    state["tied"], state["flat"] = state["table"], state["table"].view(-1)
    assert state_digests(state) == state_digests(dense)
    with watching() as record:
        copy = staging.on_host(state)
    # The table, three tensors with elements, and nothing for views and strided tensors, which keep their device.
    assert record.count("hazard") == 0
    assert {name for kind, name, _ in record.summary() if kind == "d2h"} == {"non_blocking to pinned"}
    assert state_digests(copy) == state_digests(dense)
    assert copy["table"].device.type == copy["halves"][1].device.type == "cpu"
    assert copy["tied"].data_ptr() == copy["table"].data_ptr() == copy["flat"].data_ptr()
