"""Facts about masks and positions that the host notes before a batch goes to the device."""

from typing import Any

import torch
from transformers import LlamaForCausalLM

from forgather.ml.trainer.step_loss import known_masks
from forgather.ml.trainer.step_loss.known_masks import counts_positions, to_device
from tests.support.tiny_models import TokenModel, tiny_llama

ELSEWHERE = torch.device("meta")


def test_notes_hold_for_the_rows_of_a_slice_until_the_tensor_changes() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]])
    positions = torch.tensor([[0, 1, 2], [5, 6, 7], [0, 1, 0], [0, 1, 2]])
    batch = to_device({"attention_mask": mask, "position_ids": positions}, ELSEWHERE)
    assert known_masks._read(batch["attention_mask"]) == [True, False, True, True]
    assert known_masks._read(batch["position_ids"]) == [True, True, False, True]
    assert known_masks._read(batch["attention_mask"][1:3]) == [False, True]
    assert known_masks._read(batch["attention_mask"].view(4, -1)[2:]) == [True, True]
    for changed in (batch["attention_mask"][:, :2], batch["attention_mask"].t(), batch["attention_mask"].clone()):
        assert known_masks._read(changed) is None
    batch["attention_mask"].zero_()
    assert known_masks._read(batch["attention_mask"]) is None
    assert known_masks._read(batch["attention_mask"][1:]) is None


def test_one_row_of_positions_serves_all_samples() -> None:
    positions = to_device({"position_ids": torch.arange(3).unsqueeze(0)}, ELSEWHERE)["position_ids"]
    assert known_masks._read(positions.expand(4, -1)) == [True]


def test_a_custom_forward_may_pack_sequences() -> None:
    class Packing(LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    assert counts_positions(tiny_llama())
    assert not counts_positions(Packing(tiny_llama().config))
    assert not counts_positions(TokenModel())
