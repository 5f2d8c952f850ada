"""Hypothesis strategies for all kinds of mutations; each draws a plain description that can be replayed."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.guarantees.hostile_checkpoints.fuzz import archive_mutations as archives
from tests.guarantees.hostile_checkpoints.fuzz import file_mutations as files
from tests.guarantees.hostile_checkpoints.fuzz import json_mutations as texts
from tests.guarantees.hostile_checkpoints.fuzz import state_mutations as states
from tests.guarantees.hostile_checkpoints.fuzz import weight_mutations as weights
from tests.guarantees.hostile_checkpoints.fuzz.place import MANIFEST, METADATA, Place
from tests.guarantees.hostile_checkpoints.fuzz.state_values import VALUES


@dataclass(frozen=True)
class Mutation:
    """One change to one file of the newer checkpoint of a job."""

    subject: str
    kind: str
    target: str
    arguments: dict[str, Any]
    is_sealed: bool
    """Whether sizes and checksums are updated to match, so that the load must judge the content."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Mutation":
        return cls(**json.loads(text))

    def apply(self, place: Place) -> bool:
        """Change the file, and return whether the new content is valid but other data."""
        return KINDS[self.kind].apply(place, **self.arguments)


@dataclass(frozen=True)
class Kind:
    """Way to change a file."""

    apply: Callable[..., bool]
    fits: Callable[[str], bool]
    arguments: dict[str, SearchStrategy[Any]]
    share: int = 2
    """Share of this kind among the examples, relative to other kinds."""
    may_be_sealed: bool = True


def _is_json(name: str) -> bool:
    return name.endswith(".json")


def _is_manifest(name: str) -> bool:
    return name == MANIFEST


def _is_state(name: str) -> bool:
    return name.endswith(".pt")


def _is_binary(name: str) -> bool:
    return name.endswith(".bin")


def _is_archive(name: str) -> bool:
    return name.endswith((".pt", ".bin"))


def _is_safetensors(name: str) -> bool:
    return name.endswith(".safetensors")


def _any(name: str) -> bool:
    return True


ROUTES = st.lists(st.integers(0, 1000), max_size=6)
NUMBERS = st.integers(0, 2**40)
RAW = st.sampled_from([*texts.RAW_VALUES, texts.WAY_OUT])
PLAIN_RAW = st.sampled_from(list(texts.RAW_VALUES))


def _one_of(names: Mapping[str, Any]) -> SearchStrategy[str]:
    return st.sampled_from(list(names))


def _replacements() -> SearchStrategy[str]:
    # Root can read every file.
    return st.sampled_from([way for way in files.REPLACEMENTS if way != "unreadable" or os.geteuid() != 0])


KINDS: dict[str, Kind] = {
    "json.replace": Kind(texts.replace_value, _is_json, {"route": ROUTES, "value": RAW}, share=10),
    "json.remove": Kind(texts.remove_value, _is_json, {"route": ROUTES}),
    "json.add": Kind(
        texts.add_value, _is_json, {"route": ROUTES, "key": st.sampled_from(texts.ODD_KEYS), "value": RAW}
    ),
    "json.repeat": Kind(texts.repeat_key, _is_json, {"route": ROUTES, "value": RAW}),
    "json.swap": Kind(texts.swap_values, _is_json, {"route": ROUTES, "other": ROUTES}),
    "json.text": Kind(texts.rewrite_text, _is_json, {"way": _one_of(texts.TEXTS), "number": NUMBERS}, share=4),
    "json.version": Kind(texts.set_version, _is_manifest, {"value": PLAIN_RAW}, share=1),
    "json.seal": Kind(
        texts.change_seal, _is_manifest, {"route": ROUTES, "value": PLAIN_RAW}, share=1, may_be_sealed=False
    ),
    "state.replace": Kind(states.replace_node, _is_state, {"route": ROUTES, "value": _one_of(VALUES)}, share=16),
    "state.remove": Kind(states.remove_node, _is_state, {"route": ROUTES}),
    "state.add": Kind(states.add_node, _is_state, {"route": ROUTES, "key": NUMBERS, "value": _one_of(VALUES)}),
    "state.rename": Kind(states.rename_key, _is_state, {"route": ROUTES, "key": NUMBERS}),
    "state.swap": Kind(states.swap_nodes, _is_state, {"route": ROUTES, "other": ROUTES}),
    "archive.rebuild": Kind(
        archives.rebuild_archive, _is_archive, {"way": _one_of(archives.ARCHIVES), "number": NUMBERS}, share=5
    ),
    "archive.pickle": Kind(
        archives.replace_pickle, _is_archive, {"way": _one_of(archives.PICKLES), "number": NUMBERS}, share=5
    ),
    "archive.bare": Kind(archives.bare_pickle, _is_archive, {"way": _one_of(archives.PICKLES), "number": NUMBERS}),
    "binary.weights": Kind(
        states.change_weights, _is_binary, {"name": NUMBERS, "way": _one_of(states.WEIGHTS)}, share=4
    ),
    "safetensors.header": Kind(
        weights.change_header,
        _is_safetensors,
        {"way": _one_of(weights.HEADERS), "tensor": NUMBERS, "number": NUMBERS},
        share=5,
    ),
    "safetensors.value": Kind(
        weights.change_header_value,
        _is_safetensors,
        {"route": ROUTES, "value": st.sampled_from([*texts.RAW_VALUES, "removed"])},
        share=3,
    ),
    "safetensors.length": Kind(
        weights.change_length, _is_safetensors, {"way": _one_of(weights.LENGTHS), "number": NUMBERS}
    ),
    "file.flip": Kind(files.flip_bits, _any, {"positions": st.lists(NUMBERS, min_size=1, max_size=5)}, share=4),
    "file.overwrite": Kind(
        files.overwrite, _any, {"position": NUMBERS, "length": st.integers(1, 5000), "byte": st.integers(0, 255)}
    ),
    "file.resize": Kind(
        files.resize,
        _any,
        {"way": st.sampled_from(["cut", "cut in front", "lengthened", "twice", "sparse end"]), "number": NUMBERS},
    ),
    "file.exchange": Kind(files.exchange_files, _any, {"number": NUMBERS}),
    "file.older": Kind(files.take_older, _any, {}, share=1),
    "file.replace": Kind(files.replace_file, _any, {"way": _replacements()}, share=6),
}
# Important files are drawn more often. The manifest comes first, because it lists all other files.
_WEIGHTS = {MANIFEST: 5, METADATA: 2, "optimizer_state.pt": 3, "rng_state_rank_0.pt": 2, "trainer_state.pt": 2}


def mutations_of(kind: str, file_names: Mapping[str, Sequence[str]]) -> SearchStrategy[Mutation]:
    """Return mutations of one kind; `file_names` maps each subject to the files of its checkpoint."""
    one = KINDS[kind]
    places = [
        (subject, name)
        for subject, names in file_names.items()
        for name in names
        if one.fits(name)
        for _ in range(_WEIGHTS.get(name, 1))
    ]
    sealed = st.sampled_from([True, True, True, True, False] if one.may_be_sealed else [False])
    return st.builds(
        lambda place, arguments, is_sealed: Mutation(place[0], kind, place[1], arguments, is_sealed),
        st.sampled_from(places),
        st.fixed_dictionaries(one.arguments),
        sealed,
    )
