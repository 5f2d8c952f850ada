"""The checkpoint format is public: a checkpoint that an earlier version wrote loads and resumes exactly.

`tests/fixtures/checkpoint_of_format_1` was written at step 4 of 8 by the first version with this format, and
`end_of_format_1.json` holds what that version had at step 8.
"""

import hashlib
import json
import shutil
from pathlib import Path

import torch

from forgather.ml.checkpoint import store
from forgather.ml.trainer.callbacks.early_stopping import EarlyStopping
from tests.support.tiny_models import TokenModel, quiet_trainer, token_samples

FIXTURES = Path(__file__).parents[2] / "fixtures"


def test_a_checkpoint_of_an_earlier_version_resumes_exactly(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "checkpoint-4"
    shutil.copytree(FIXTURES / "checkpoint_of_format_1", checkpoint)
    assert store.verify_checkpoint(str(checkpoint)) == []
    trainer = quiet_trainer(
        tmp_path,
        TokenModel(),
        token_samples(16),
        EarlyStopping(patience=50),
        max_steps=8,
        shuffle=True,
        save_strategy="steps",
        save_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        ema_decay=0.9,
        logging_strategy="steps",
        logging_steps=1,
        lr_scheduler_type="cosine",
        trainer_options={
            "eval_dataset": token_samples(4),
            "optimizer_cls_and_kwargs": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
        },
    )
    trainer.train()
    end = json.loads((FIXTURES / "end_of_format_1.json").read_text())
    assert [record["loss"] for record in trainer.state.log_history if "loss" in record] == end["losses"]
    assert trainer.model is not None
    digests = {
        name: hashlib.sha256(value.numpy().tobytes()).hexdigest()
        for name, value in trainer.unwrapped_model().state_dict().items()
    }
    assert digests == end["weights"]
