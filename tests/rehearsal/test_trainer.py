"""Single-device training on the rehearsal device: no host waits between logs."""

import torch

from tests.support.rehearsal import watching


def test_item_is_a_host_wait() -> None:
    value = torch.ones((), device="cuda")
    with watching() as record:
        assert value.item() == 1
    assert record.count("sync") == 1
