"""Callbacks package: lazy imports and default callbacks."""

import subprocess
import sys

import pytest

from forgather.ml.trainer import callbacks
from tests.support.sampling import sampled

HEAVY = ("rich", "matplotlib", "tensorboard", "transformers")


def test_importing_the_package_imports_no_heavy_library() -> None:
    program = f"import sys, forgather.ml.trainer.callbacks\nprint([name for name in {HEAVY} if name in sys.modules])\n"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("name", [name for name in callbacks.__all__ if name != "default_callbacks"])
def test_every_callback_is_exported_under_its_name(name: str) -> None:
    assert getattr(callbacks, name).__name__ == name


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchCallback"):
        _ = callbacks.NoSuchCallback


def test_default_callbacks_are_new_objects_each_time() -> None:
    first, second = callbacks.default_callbacks(), callbacks.default_callbacks()
    names = ["ProgressCallback", "InfoCallback", "DefaultMetrics", "JsonLogger", "RunRecorder"]
    assert [callback.name for callback in first] == names
    assert not {id(callback) for callback in first} & {id(callback) for callback in second}


IMPORTS = [
    "from forgather.ml.trainer.callbacks import default_callbacks",
    "from forgather.ml.trainer.callbacks.default_callbacks import InfoCallback, ProgressCallback\n"
    "from forgather.ml.trainer.callbacks import default_callbacks",
    "from forgather.ml.trainer.callbacks import default_callbacks\n"
    "from forgather.ml.trainer.callbacks.default_callbacks import InfoCallback, ProgressCallback",
]


@pytest.mark.parametrize("imports", sampled(IMPORTS, IMPORTS[1:2]))
def test_default_callbacks_is_a_function_and_a_module(imports: str) -> None:
    program = f"{imports}\nprint([type(one).__name__ for one in default_callbacks()][:2])\n"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['ProgressCallback', 'InfoCallback']"
