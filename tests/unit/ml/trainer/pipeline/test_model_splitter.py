"""Division of layers among pipeline stages."""

import pytest

from forgather.ml.trainer.pipeline.model_splitter import layer_ranges


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "input_weight", "output_weight", "expected"),
    [
        (4, 1, 1, 1, [4]),
        (8, 2, 1, 1, [4, 4]),
        (4, 4, 1, 1, [1, 1, 1, 1]),
        (10, 4, 1, 1, [2, 3, 3, 2]),
        (30, 8, 1, 1, [3, 4, 4, 4, 4, 4, 4, 3]),
        (12, 4, 0, 0, [3, 3, 3, 3]),
        (12, 2, 4, 0, [4, 8]),
        (12, 2, 0, 4, [8, 4]),
        (12, 4, 2, 2, [2, 4, 4, 2]),
        (4, 4, 100, 0, [1, 1, 1, 1]),
        (8, 4, 100, 100, [1, 3, 3, 1]),
        (9, 2, 0.5, 1.5, [5, 4]),
    ],
)
def test_layers_are_divided_evenly_with_weights_for_input_and_output(
    num_layers: int, num_stages: int, input_weight: float, output_weight: float, expected: list[int]
) -> None:
    ranges = layer_ranges(num_layers, num_stages, input_weight, output_weight)
    assert [number for one in ranges for number in one] == list(range(num_layers))
    assert [len(one) for one in ranges] == expected


@pytest.mark.parametrize("weights", [(0, 0), (1, 1), (3, 0), (0, 7), (50, 50), (0.25, 2.5)])
def test_every_stage_gets_a_layer_and_every_layer_a_stage(weights: tuple[float, float]) -> None:
    for num_layers in range(1, 25):
        for num_stages in range(1, num_layers + 1):
            ranges = layer_ranges(num_layers, num_stages, *weights)
            assert len(ranges) == num_stages
            assert all(ranges)
            assert [number for one in ranges for number in one] == list(range(num_layers))


def test_without_weights_stages_differ_by_at_most_one_layer() -> None:
    for num_layers in range(1, 40):
        for num_stages in range(1, num_layers + 1):
            sizes = [len(one) for one in layer_ranges(num_layers, num_stages, 0, 0)]
            assert max(sizes) - min(sizes) <= 1, (num_layers, num_stages, sizes)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(0, 1), (1, 2), (7, 8)])
def test_more_stages_than_layers_are_rejected(num_layers: int, num_stages: int) -> None:
    with pytest.raises(ValueError, match=f"{num_layers} layers.*into {num_stages} stages.*every stage needs a layer"):
        layer_ranges(num_layers, num_stages, 1, 1)


@pytest.mark.parametrize("weights", [(-1, 0), (0, -0.5)])
def test_negative_weights_are_rejected(weights: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"input_weight=.* and output_weight=.* must be 0 or more"):
        layer_ranges(8, 2, *weights)
