"""A run that is resumed with another batch size trains every remaining sample once per epoch."""

from pathlib import Path

from tests.support.tiny_models import ScalarModel, quiet_trainer, scalars


def test_resume_at_the_end_of_an_epoch_with_another_batch_size_trains_all_remaining_epochs(tmp_path: Path) -> None:
    def trained(batch_size: int, num_epochs: int) -> tuple[int, float, list[float]]:
        values: list[float] = []
        model = ScalarModel(0.0)
        model.register_forward_pre_hook(
            lambda _, args, kwargs: values.extend(kwargs["value"].tolist()), with_kwargs=True
        )
        settings = {"num_train_epochs": num_epochs, "per_device_train_batch_size": batch_size, "save_strategy": "epoch"}
        trainer = quiet_trainer(tmp_path, model, scalars(*range(8)), **settings)
        output = trainer.train()
        return output.global_step, trainer.state.epoch, values

    assert trained(4, 1)[:2] == (2, 1.0)
    steps, epoch, values = trained(2, 3)
    assert (steps, epoch) == (2 + 2 * 4, 3.0)
    assert values[-16:] == [*range(8), *range(8)], "two whole epochs"
    # A finished run has nothing left, also with yet another batch size.
    assert trained(8, 3)[:2] == (10, 3.0)
