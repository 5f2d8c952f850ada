"""Settings of elastic jobs that contradict each other are refused with the arithmetic, and ranges of nodes are parsed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from forgather.cli.errors import UsageError
from forgather.cli.launch.options import ELASTIC_VARIABLE, LaunchOptions, take_launch_options
from forgather.cli.work.spares import Layout
from forgather.ml.trainer.ddp import DDPTrainingArguments
from forgather.ml.trainer.elastic.global_batch import settle_global_batch, shares_of_part
from forgather.ml.trainer.fsdp2 import FSDP2TrainingArguments
from forgather.ml.trainer.hybrid import HybridTrainingArguments
from forgather.ml.trainer.loading.data_order import WHOLE, Part
from forgather.ml.trainer.ranks.parallel_loading import DataLayout
from forgather.ml.trainer.trainer import TrainingArguments
from tests.support.tiny_models import ScalarModel, Stream, quiet_trainer, scalars

THREE = DataLayout(Part(1, 3))


@pytest.mark.parametrize(
    ("settings", "dataset", "message"),
    [
        (
            {"gradient_accumulation_steps": 4},
            [1],
            r"takes 2 micro-batches per rank and step: 8 / \(3 x 2\), rounded up",
        ),
        ({"token_weighted_loss": False}, [1], "token_weighted_loss=False"),
        ({"fuse_optim_with_backward": True}, [1], "takes 2 micro-batches .* fuse_optim_with_backward=True"),
        ({}, DataLoader([1]), "a loader"),  # type: ignore[arg-type]
        ({}, Stream([1]), "reads its own stream"),
    ],
)
def test_contradictions_are_refused_with_the_arithmetic(settings: dict[str, Any], dataset: Any, message: str) -> None:
    args = TrainingArguments(global_batch_size=8, per_device_train_batch_size=2, **settings)
    with pytest.raises(ValueError, match=message):
        settle_global_batch(args, dataset, THREE)


def test_static_graph_is_refused_if_a_step_has_several_micro_batches() -> None:
    args = DDPTrainingArguments(global_batch_size=8, per_device_train_batch_size=2, ddp={"static_graph": True})
    with pytest.raises(ValueError, match=r"takes 2 micro-batches .*static_graph"):
        settle_global_batch(args, [1], THREE)
    args.per_device_train_batch_size = 3
    shares = settle_global_batch(args, [1], THREE)
    assert shares is not None and shares.sizes(8) == [3, 3, 2] and args.gradient_accumulation_steps == 1


def test_datasets_of_different_ranks_are_refused() -> None:
    args = TrainingArguments(global_batch_size=8, per_device_train_batch_size=2)
    shares = settle_global_batch(args, [1], THREE)
    assert shares is not None and shares_of_part(shares, THREE.part) is shares
    with pytest.raises(ValueError, match="the same dataset on all ranks"):
        shares_of_part(shares, WHOLE)


def test_stream_is_divided_evenly_or_refused(tmp_path: Path) -> None:
    for size, per_device, num_passes in ((6, 4, 2), (8, 3, 4), (7, 4, 7)):
        trainer = quiet_trainer(
            tmp_path / str(size),
            ScalarModel(),
            Stream(scalars(*range(30))),
            max_steps=2,
            global_batch_size=size,
            per_device_train_batch_size=per_device,
        )
        trainer.train()
        assert trainer.args.gradient_accumulation_steps == num_passes
        assert trainer.reporter.final_record(trainer.lr_scheduler, 1, lambda one: one)["train_samples"] == 2 * size
    dispatched = DataLayout(Part(0, 3), readers=[range(3)], reads_whole=True)
    with pytest.raises(ValueError, match=r"8 = 3 x 2 \+ 2\. Choose a multiple of 3, such as 6"):
        settle_global_batch(TrainingArguments(global_batch_size=8), Stream([1]), dispatched)


def test_range_of_nodes_is_parsed() -> None:
    words = ["--nnodes", "2:4", "--rdzv-endpoint", "node0:29400", "--node-wait", "0", "--nproc", "8", "x.yaml"]
    options, others = take_launch_options(words)
    nodes = {"num_nodes": 4, "min_nodes": 2, "node_wait": 0, "names_nodes": True}
    expected = LaunchOptions(**nodes, num_processes=8, rendezvous_endpoint="node0:29400")
    assert options == expected and options.is_elastic and options.needs_launcher and others == ["x.yaml"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "4:2", "--rdzv-endpoint", "a:1"], "expected MIN:MAX"),
        (["--nnodes", "2:", "--rdzv-endpoint", "a:1"], "expected MIN:MAX"),
        (["--nnodes", "2:4"], "also needs --rdzv-endpoint"),
        (["--nnodes", "2:4", "--rdzv-endpoint", "a"], "expected HOST:PORT"),
        (["--node-wait", "4"], "--node-wait is for a range of nodes"),
    ],
)
def test_wrong_ranges_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        take_launch_options(words)


def layout(monkeypatch: pytest.MonkeyPatch, kind: str, args: Any, size: int, rank: int = 0) -> Layout:
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv(ELASTIC_VARIABLE, "2:4")
    configuration: Any = SimpleNamespace(trainer=SimpleNamespace(kind=kind), args=args)
    return Layout(configuration)


def test_pipelines_shrink_to_the_ranks_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    args = HybridTrainingArguments(dp_size=2, pp_size=2)
    found = [layout(monkeypatch, "hybrid", args, 3, rank) for rank in range(3)]
    assert [one.is_spare for one in found] == [False, False, True] and args.dp_size == 1
    assert layout(monkeypatch, "hybrid", args, 4).num_spares == 0 and args.dp_size == 2
    with pytest.raises(UsageError, match="needs 2 ranks, and 1 are left"):
        layout(monkeypatch, "hybrid", args, 1)
    with pytest.raises(UsageError, match=r"does not fit the 3 ranks that are left, and args\.elastic='fail'"):
        layout(monkeypatch, "hybrid", HybridTrainingArguments(pp_size=2, elastic="fail"), 3)


def test_replicas_of_hsdp_shrink_without_spares(monkeypatch: pytest.MonkeyPatch) -> None:
    for size, expected in ((8, 2), (3, 1), (2, 1)):
        args = FSDP2TrainingArguments(fsdp2={"replicate_size": 2})
        assert layout(monkeypatch, "fsdp2", args, size).num_spares == 0
        assert args.fsdp2.replicate_size == expected
