"""Declarations that cannot work are refused when they are made."""

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


def test_there_are_five_patterns() -> None:
    assert {pattern.name: pattern.value for pattern in SharingPattern} == {
        "GLOBAL": "global",
        "PER_RANK": "per_rank",
        "REPLICATED": "replicated",
        "PER_GROUP": "per_group",
        "PER_NODE": "per_node",
    }


def test_per_group_needs_a_family() -> None:
    with pytest.raises(ValueError, match="must specify process_group_name"):
        StateComponent("model", Nothing(), SharingPattern.PER_GROUP)
    StateComponent("model", Nothing(), SharingPattern.PER_GROUP, "dp_group", validate_replication=True)


@pytest.mark.parametrize("pattern", [SharingPattern.GLOBAL, SharingPattern.PER_RANK, SharingPattern.PER_NODE])
def test_only_copies_can_be_compared(pattern: SharingPattern) -> None:
    with pytest.raises(ValueError, match=r"validate_replication=True.*REPLICATED pattern"):
        StateComponent("model", Nothing(), pattern, validate_replication=True)


def test_levels_are_checked() -> None:
    with pytest.raises(ValueError, match="none, quick, tensor, full"):
        StateComponent("model", Nothing(), SharingPattern.REPLICATED, validation_level="thorough")


def test_defaults() -> None:
    component = StateComponent("model", Nothing(), SharingPattern.GLOBAL)
    assert component.required and not component.validate_replication and component.validation_level == "tensor"
    assert component.metadata == {} and component.process_group_name is None


def test_an_unknown_component_is_refused_with_the_nearest_name() -> None:
    components = [StateComponent(key, Nothing(), SharingPattern.GLOBAL) for key in ("model", "optimizer", "rng")]
    with pytest.raises(ValueError, match=r"checkpoint_components.*'optimiser'.*Did you mean 'optimizer'"):
        select_components(components, ["model", "optimiser"])
    with pytest.raises(ValueError, match="list of component names"):
        select_components(components, "model")
    assert [one.key for one in select_components(components, ["rng", "model"])] == ["model", "rng"]
    assert select_components(components, None) == components


def test_the_older_declaration_is_served_with_a_warning_that_says_what_to_do() -> None:
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


def test_the_newer_declaration_wins_without_a_warning() -> None:
    component = StateComponent("model", Nothing(), SharingPattern.GLOBAL)

    class Newer:
        def get_state_components(self) -> list[StateComponent]:
            return [component]

        def get_statefuls_for_save(self) -> dict[str, Any]:
            raise AssertionError("not asked")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert declared_components(Newer(), None) == [component]


def test_manifests_can_be_made_by_hand() -> None:
    manifest = CheckpointManifest("path", 1, "2026-01-01T00:00:00+00:00", {"m": ComponentManifest("m", "global", [0])})
    assert CheckpointManifest.from_dict(manifest.to_dict()) == manifest
    assert ComponentManifest("m", SharingPattern.GLOBAL, [0]).sharing_pattern == "global"  # type: ignore[arg-type]


def test_the_fingerprint_of_a_state_has_64_hex_digits() -> None:
    fingerprint = compute_state_hash({"a": torch.zeros(3)})
    assert len(fingerprint) == 64 and int(fingerprint, 16) >= 0
    assert fingerprint != compute_state_hash({"a": torch.zeros(3, dtype=torch.float64)})


@pytest.mark.parametrize("name", ["../../evil", "a/b", ".hidden", "", "a b", "a\n", "-a", 7, None])
def test_names_that_cannot_be_part_of_a_file_name_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match=r"component key .* part of file names"):
        StateComponent(name, Nothing(), SharingPattern.GLOBAL)
    if name:
        with pytest.raises(ValueError, match=r"'model': process_group_name .* part of file names"):
            StateComponent("model", Nothing(), SharingPattern.PER_GROUP, name)


def test_names_with_dots_and_dashes_are_fine_but_metadata_is_reserved() -> None:
    for name in ("ema-0.999", "model_2", "1st", "größe"):
        StateComponent(name, Nothing(), SharingPattern.PER_GROUP, name)
    with pytest.raises(ValueError, match="'metadata' is reserved"):
        StateComponent("metadata", Nothing(), SharingPattern.GLOBAL)
