"""FSDP2TrainingArguments: defaults, the rule for mixed precision, and settings that cannot work."""

from typing import Any

import pytest

from forgather.ml.trainer.fsdp2 import FSDP2Arguments, FSDP2TrainingArguments


def arguments(**settings: Any) -> FSDP2TrainingArguments:
    return FSDP2TrainingArguments(output_dir="x", **settings)


def test_defaults_are_those_of_the_specification() -> None:
    args = arguments()
    assert (args.dispatch_batches, args.dispatch_eval_batches) == (True, None)
    assert args.fsdp2 == FSDP2Arguments(
        reshard_after_forward=True,
        param_dtype=None,
        reduce_dtype=None,
        cpu_offload=False,
        shard_transformer_layers=True,
        transformer_layers_path=None,
        replicate_size=1,
    )


@pytest.mark.parametrize(
    ("settings", "compute", "reduce"),
    [
        ({}, None, None),
        ({"mixed_precision": "bf16"}, "bfloat16", "float32"),
        ({"mixed_precision": "bf16", "fsdp2": {"param_dtype": "bfloat16"}}, "bfloat16", "float32"),
        ({"fsdp2": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}}, "bfloat16", "bfloat16"),
        ({"fsdp2": {"reduce_dtype": "bf16"}}, None, "bfloat16"),
    ],
)
def test_mixed_precision_sets_the_dtypes_of_compute_and_reduction(
    settings: dict[str, Any], compute: str | None, reduce: str | None
) -> None:
    args = arguments(**settings)
    assert (args.compute_dtype, args.reduce_dtype) == (compute, reduce)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"fuse_optim_with_backward": True}, r"fuse_optim_with_backward=True cannot be combined with FSDP2.*Turn it off"),
    (
        {"param_precision": "bf16_stochastic"},
        r"param_precision='bf16_stochastic' cannot be combined.*mixed_precision='bf16'",
    ),
    ({"mixed_precision": "fp16"}, r"mixed_precision='fp16' cannot be combined.*Use 'bf16', or DDPTrainer"),
    (
        {"mixed_precision": "bf16", "fsdp2": {"param_dtype": "float32"}},
        r"mixed_precision='bf16' and fsdp2.param_dtype='float32'.*contradict.*Remove one",
    ),
    ({"construct_model_on": "meta"}, r"construct_model_on='meta' cannot be combined.*Remove the setting"),
    ({"save_on_each_node": True}, r"save_on_each_node=True cannot be combined.*one output_dir for all nodes"),
    ({"fsdp2": {"param_dtype": "int8"}}, r"fsdp2: param_dtype='int8' cannot be used.*'bfloat16'"),
    ({"fsdp2": {"param_dtype": "float16"}}, r"param_dtype='float16' cannot be used.*need a loss scale"),
    ({"fsdp2": {"reduce_dtype": "float64"}}, r"fsdp2: reduce_dtype='float64' cannot be used.*'bfloat16'"),
    ({"fsdp2": {"replicate_size": 0}}, r"fsdp2: replicate_size=0 cannot be used: it must be 1 or more"),
    ({"fsdp2": {"reshard_after_forward": -1}}, r"fsdp2: reshard_after_forward=-1 cannot be used"),
    (
        {"fsdp2": {"shard_transformer_layers": False, "transformer_layers_path": "layers"}},
        r"transformer_layers_path='layers' has no effect.*Remove one",
    ),
    ({"fsdp2": {"replicate_sizes": 2}}, r"replicate_sizes.*replicate_size"),
    ({"fsdp2": {"cpu_offload": "yes"}}, r"cpu_offload"),
    ({"fsdp2": {"replicate_size": 2.5}}, r"replicate_size"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[str(settings) for settings, _ in REFUSED])
def test_setting_that_cannot_work_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        arguments(**settings)
