"""Copies between host and rehearsal device: pinned, overlapped, and no more than needed."""

from pathlib import Path

import torch
from torch import nn

from forgather.ml.trainer.ddp.ddp_trainer import DDPTrainer
from forgather.ml.trainer.pipeline import PipelineTrainer
from forgather.ml.trainer.recipes.activation_offloading import OffloadedActivations
from forgather.ml.trainer.setup.copy_streams import copy_stream
from forgather.ml.trainer.setup.devices import moved
from tests.support.pipelines import llama
from tests.support.ranks import run_on_ranks
from tests.support.rehearsal import watching
from tests.support.rehearsed_runs import MAX_STEPS, Rehearsed, recorded, rehearse, samples
from tests.support.tiny_models import tiny_llama


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
    recorded.clear()
    with watching() as record:
        result = moved(batch, device)
    assert record.count("sync") == 0
    assert torch.equal(result["ids"].cpu(), batch["ids"])
    # The compute stream is recorded on memory of the copy stream.
    compute = torch.accelerator.current_stream(device).stream_id
    assert compute != copy_stream(device, "batches").stream_id
    assert recorded == [(result["ids"].data_ptr(), compute), (result["nested"][0].data_ptr(), compute)]


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
