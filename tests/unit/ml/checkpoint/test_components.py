"""StateComponent declarations: invalid ones are rejected at construction."""

import warnings
from typing import Any

import pytest
import torch

from forgather.ml.checkpoint.components import (
    CheckpointManifest,
    ComponentManifest,
    SharingPattern,
    StateComponent,
    compute_state_hash,
    declared_components,
    select_components,
)


class Nothing:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_sharing_pattern_has_five_values() -> None:
    assert {pattern.name: pattern.value for pattern in SharingPattern} == {
        "GLOBAL": "global",
        "PER_RANK": "per_rank",
        "REPLICATED": "replicated",
        "PER_GROUP": "per_group",
        "PER_NODE": "per_node",
    }


def test_per_group_needs_process_group_name() -> None:
    with pytest.raises(ValueError, match="must specify process_group_name"):
        StateComponent("model", Nothing(), SharingPattern.PER_GROUP)
    StateComponent("model", Nothing(), SharingPattern.PER_GROUP, "dp_group", validate_replication=True)


@pytest.mark.parametrize("pattern", [SharingPattern.GLOBAL, SharingPattern.PER_RANK, SharingPattern.PER_NODE])
def test_validate_replication_needs_replicas(pattern: SharingPattern) -> None:
    with pytest.raises(ValueError, match=r"validate_replication=True.*REPLICATED pattern"):
        StateComponent("model", Nothing(), pattern, validate_replication=True)


def test_unknown_validation_level_is_rejected() -> None:
    with pytest.raises(ValueError, match="none, quick, tensor, full"):
        StateComponent("model", Nothing(), SharingPattern.REPLICATED, validation_level="thorough")


def test_component_defaults() -> None:
    component = StateComponent("model", Nothing(), SharingPattern.GLOBAL)
    assert component.required and not component.validate_replication and component.validation_level == "tensor"
    assert component.metadata == {} and component.process_group_name is None


def test_unknown_component_error_suggests_the_nearest_name() -> None:
    components = [StateComponent(key, Nothing(), SharingPattern.GLOBAL) for key in ("model", "optimizer", "rng")]
    with pytest.raises(ValueError, match=r"checkpoint_components.*'optimiser'.*Did you mean 'optimizer'"):
        select_components(components, ["model", "optimiser"])
    with pytest.raises(ValueError, match="list of component names"):
        select_components(components, "model")
    assert [one.key for one in select_components(components, ["rng", "model"])] == ["model", "rng"]
    assert select_components(components, None) == components


def test_deprecated_declaration_works_with_a_warning() -> None:
    class Older:
        def get_statefuls_for_save(self) -> dict[str, Any]:
            return {"scheduler": Nothing()}

        def get_state_components(self) -> None:
            return None

    with pytest.warns(DeprecationWarning, match="get_state_components"):
        components = declared_components(Older(), torch.nn.Linear(1, 1))
    assert [(one.key, one.sharing_pattern) for one in components] == [
        ("model", SharingPattern.GLOBAL),
        ("scheduler", SharingPattern.GLOBAL),
    ]
    with pytest.raises(ValueError, match="declares no state"):
        declared_components(object(), None)


def test_get_state_components_wins_without_a_warning() -> None:
    component = StateComponent("model", Nothing(), SharingPattern.GLOBAL)

    class Newer:
        def get_state_components(self) -> list[StateComponent]:
            return [component]

        def get_statefuls_for_save(self) -> dict[str, Any]:
            raise AssertionError("not asked")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert declared_components(Newer(), None) == [component]


def test_manifest_round_trips_through_a_dict() -> None:
    manifest = CheckpointManifest("path", 1, "2026-01-01T00:00:00+00:00", {"m": ComponentManifest("m", "global", [0])})
    assert CheckpointManifest.from_dict(manifest.to_dict()) == manifest
    assert ComponentManifest("m", SharingPattern.GLOBAL, [0]).sharing_pattern == "global"  # type: ignore[arg-type]


def test_state_hash_has_64_hex_digits() -> None:
    fingerprint = compute_state_hash({"a": torch.zeros(3)})
    assert len(fingerprint) == 64 and int(fingerprint, 16) >= 0
    assert fingerprint != compute_state_hash({"a": torch.zeros(3, dtype=torch.float64)})


@pytest.mark.parametrize("name", ["../../evil", "a/b", ".hidden", "", "a b", "a\n", "-a", 7, None])
def test_names_invalid_in_file_names_are_rejected(name: Any) -> None:
    with pytest.raises(ValueError, match=r"component key .* part of file names"):
        StateComponent(name, Nothing(), SharingPattern.GLOBAL)
    if name:
        with pytest.raises(ValueError, match=r"'model': process_group_name .* part of file names"):
            StateComponent("model", Nothing(), SharingPattern.PER_GROUP, name)


def test_dots_and_dashes_are_valid_but_metadata_is_reserved() -> None:
    for name in ("ema-0.999", "model_2", "1st", "größe"):
        StateComponent(name, Nothing(), SharingPattern.PER_GROUP, name)
    with pytest.raises(ValueError, match="'metadata' is reserved"):
        StateComponent("metadata", Nothing(), SharingPattern.GLOBAL)
