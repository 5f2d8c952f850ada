"""Optional packages: without one, everything else works, and the message names the extra that installs it."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from forgather._extras import EXTRAS, MissingPackageError, install_command, is_installed
from forgather.cli.errors import UsageError
from forgather.ml.trainer.callbacks import PlotCallback
from tests.unit.ml.trainer.callbacks.run import Run


def hide(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make packages look as if they were not installed, to `import` and to `find_spec`."""
    for package in packages:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
        assert not is_installed(package)


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("matplotlib", "pip install 'forgather[plot]'"),
        ("pyarrow", "pip install 'forgather[datasets]'"),
        ("bitsandbytes", "pip install bitsandbytes"),
    ],
)
def test_command_names_the_extra_of_a_package(package: str, command: str) -> None:
    assert install_command(package) == command


def test_training_without_matplotlib_warns_once_and_draws_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    hide(monkeypatch, "matplotlib")
    callback = PlotCallback(min_seconds=0)
    run = Run(tmp_path, callback)
    run.send("on_train_begin")
    run.train([2.0, 1.0])
    run.send("on_train_end")
    assert [record.getMessage() for record in caplog.records] == [
        "training.png is not drawn. PlotCallback needs the package matplotlib, which is not installed: "
        "pip install 'forgather[plot]'."
    ]
    # The curves are kept, so that a resume with matplotlib draws the whole run.
    assert list(tmp_path.iterdir()) == [] and callback.state_dict()["loss"]["values"] == [2.0, 1.0]


def test_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from forgather.ml.trainer.callbacks.plot import draw_png

    hide(monkeypatch, "matplotlib")
    with pytest.raises(MissingPackageError, match=r"forgather\[plot\]"):
        draw_png({})


def test_tensorboard_logger_fails_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from forgather.ml.trainer.callbacks import TBLogger

    hide(monkeypatch, "tensorboard")
    with pytest.raises(MissingPackageError, match=r"TBLogger needs .*forgather\[tensorboard\]"):
        TBLogger()


def test_accelerate_is_named_by_all_that_need_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from forgather.config.trainer_kinds import load_trainer
    from forgather.hf import TrainingArguments

    hide(monkeypatch, "accelerate")
    checks = "forgather.ml.trainer.accelerate.accelerator_checks"
    monkeypatch.delitem(sys.modules, checks, raising=False)
    with pytest.raises(MissingPackageError, match=r"AccelTrainer needs .*forgather\[accelerate\]"):
        importlib.import_module(checks)
    with pytest.raises(MissingPackageError, match=r"TrainingArguments .*forgather\[accelerate\]"):
        TrainingArguments(output_dir=str(tmp_path))
    with pytest.raises(UsageError, match=r"--trainer accelerate .*forgather\[accelerate\]"):
        load_trainer("accelerate")


def test_torchao_is_named_by_recipes_and_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    from forgather.ml.optim.named_optimizers import require_optimizer
    from forgather.ml.quantization.float8 import require_torchao

    hide(monkeypatch, "torchao")
    with pytest.raises(ValueError, match=r"fp8_recipe='rowwise' needs .*forgather\[torchao\]"):
        require_torchao("fp8_recipe", "rowwise")
    with pytest.raises(ValueError, match=r"optim='adamw_torch_8bit' needs .*forgather\[torchao\]"):
        require_optimizer(SimpleNamespace(optim="adamw_torch_8bit", optim_args=None), has_own=False)


def test_readers_of_data_name_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from forgather.data.documents import read_documents, read_saved_dataset

    hide(monkeypatch, "datasets", "pyarrow")
    (tmp_path / "a.parquet").touch()
    for documents in (read_saved_dataset(str(tmp_path)), read_documents([str(tmp_path / "a.parquet")])):
        with pytest.raises(MissingPackageError, match=r"Reading .* needs .*forgather\[datasets\]"):
            next(iter(documents))


def test_every_extra_says_what_it_is_for() -> None:
    assert all(extra.feature and not extra.feature.endswith(".") for extra in EXTRAS.values())
