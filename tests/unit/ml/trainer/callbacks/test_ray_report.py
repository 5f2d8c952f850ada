"""RayReportCallback without Ray; `make test-ray` tests it with Ray."""

import pytest

from forgather._extras import MissingPackageError, is_installed
from forgather.ml.trainer.callbacks import RayReportCallback


@pytest.mark.skipif(is_installed("ray"), reason="Ray is installed")
def test_missing_ray_is_named_with_its_extra() -> None:
    with pytest.raises(MissingPackageError, match=r"pip install .forgather\[ray\]."):
        RayReportCallback()
