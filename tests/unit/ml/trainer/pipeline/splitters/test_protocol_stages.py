"""Three-part models that follow the splitter protocol: stages equal the full model and train like others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.pipelines import pipeline_trainer
from tests.support.ranks import run_on_ranks
from tests.support.staging import MakeModel, filled, in_a_row, on_meta, split
from tests.support.tiny_models import VOCAB_SIZE, quiet_trainer, token_samples

NUM_LAYERS, ROWS, LENGTH = 4, 3, 7
TOKEN_IDS = torch.randint(1, VOCAB_SIZE, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
MASK = torch.ones(ROWS, LENGTH, dtype=torch.int64)
MASK[0, :3] = 0


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB_SIZE, 8)
        self.positions = nn.Embedding(LENGTH, 8)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        places = torch.arange(input_ids.shape[1]) if position_ids is None else position_ids
        return self.tokens(input_ids) + self.positions(places)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Layer that adds the mean over the unmasked tokens; it accepts no other keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, hidden: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        values = torch.tanh(self.inner(hidden)) * self.scale
        weight = torch.ones(hidden.shape[:2]) if attention_mask is None else attention_mask.float()
        return hidden + values + (values * weight[..., None]).mean(1, keepdim=True)


class Decoder(nn.Module):
    """Decoder that accepts any keyword and uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, VOCAB_SIZE)

    def forward(self, hidden: Tensor, **keywords: Tensor) -> Tensor:
        return self.head(hidden) * keywords.get("temperature", torch.ones(1)).view(-1, 1, 1)  # type: ignore[no-any-return]


class ThreeParts(nn.Module):
    """Model that follows the protocol and runs its parts in sequence."""

    def __init__(self, by_name: bool = False) -> None:
        super().__init__()
        self.input_encoder = Encoder()
        layers = {f"layer_{number}": Layer() for number in range(NUM_LAYERS)}
        self.layer_stack = nn.ModuleDict(layers) if by_name else nn.ModuleList(layers.values())
        self.output_decoder = Decoder()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **keywords: Tensor,
    ) -> Tensor:
        hidden = self.input_encoder(input_ids, position_ids)
        stack = self.layer_stack
        for layer in stack.values() if isinstance(stack, nn.ModuleDict) else stack:
            hidden = layer(hidden, attention_mask=attention_mask)
        return self.output_decoder(hidden, **keywords)  # type: ignore[no-any-return]


class MakingMasks(ThreeParts):
    """Model that creates its mask from the token ids and another batch tensor, which no part accepts."""

    def attention_mask_creator(self, input_ids: Tensor, kept: Tensor, **_: Tensor) -> Tensor:
        return (input_ids % 2 == 0) & kept

    def forward(self, input_ids: Tensor, kept: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, self.attention_mask_creator(input_ids, kept))


class LayersByName(ThreeParts):
    def __init__(self) -> None:
        super().__init__(by_name=True)


KEYWORDS: Mapping[str, Tensor] = {
    "attention_mask": MASK,
    "position_ids": (MASK.cumsum(1) - 1).clamp(min=0),
    "temperature": torch.arange(1.0, ROWS + 1),
}


@pytest.mark.parametrize("make", [ThreeParts, LayersByName])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_protocol_stages_equal_the_full_model(make: MakeModel, num_stages: int) -> None:
    torch.manual_seed(0)
    model = make()
    whole = on_meta(make)
    names = list(whole.state_dict())
    modules = split(whole, num_stages)[0]
    assert sorted(name for module in modules for name in module.state_dict()) == sorted(names)
    modules = filled(modules, model)
    with torch.no_grad():
        expected = model(TOKEN_IDS, **KEYWORDS)
        assert torch.equal(in_a_row(modules, TOKEN_IDS, **KEYWORDS), expected)
        for left_out in KEYWORDS:
            fewer = {name: value for name, value in KEYWORDS.items() if name != left_out}
            logits = in_a_row(modules, TOKEN_IDS, **fewer)
            assert torch.equal(logits, model(TOKEN_IDS, **fewer))
            assert not torch.equal(logits, expected), f"{left_out} must matter, or it is not tested"


def test_parameter_outside_the_three_parts_is_rejected() -> None:
    class FourParts(ThreeParts):
        def __init__(self) -> None:
            super().__init__()
            self.extra = nn.Linear(2, 2)

    message = r"FourParts has 'extra\.weight' outside of input_encoder, layer_stack, output_decoder.*Move it into one"
    with pytest.raises(ValueError, match=message):
        split(on_meta(FourParts), 2)


def test_more_stages_than_protocol_layers_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"4 layers.*into 5 stages"):
        split(on_meta(ThreeParts), 5)


def test_splitter_returns_the_attention_mask_creator() -> None:
    assert split(on_meta(ThreeParts), 2)[3] is None
    make_mask = split(on_meta(MakingMasks), 2)[3]
    assert make_mask is not None
    kept = torch.arange(LENGTH) > 1
    assert torch.equal(make_mask(input_ids=TOKEN_IDS, kept=kept), (TOKEN_IDS % 2 == 0) & kept)


def _samples() -> list[dict[str, Tensor]]:
    return [{**sample, "kept": torch.arange(6) > number % 5} for number, sample in enumerate(token_samples(10))]


SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "max_steps": 3,
    "logging_strategy": "steps",
    "logging_steps": 1,
}


def _train_and_evaluate(output_dir: Path) -> tuple[float, float]:
    trainer = pipeline_trainer(output_dir, MakingMasks, _samples(), n_microbatches=2, **SETTINGS)
    return trainer.train().metrics["train_loss"], trainer.evaluate(_samples())["eval_loss"]


def test_created_masks_reach_every_stage_in_training_and_evaluation(tmp_path: Path) -> None:
    trainer = quiet_trainer(
        tmp_path / "single", None, _samples(), trainer_options={"model_init": MakingMasks}, **SETTINGS
    )
    expected = (trainer.train().metrics["train_loss"], trainer.evaluate(_samples())["eval_loss"])
    for result in run_on_ranks(_train_and_evaluate, 3, tmp_path / "pipeline"):
        assert result == pytest.approx(expected, rel=1e-6)
