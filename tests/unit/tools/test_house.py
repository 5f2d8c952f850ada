"""House measurements: static figures of a small package, the table, and the call counter."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from house import Figures, as_comparison, as_text, rows_of
from house_static import (
    OurClass,
    SourceTree,
    annotations,
    attribute_use,
    file_sizes,
    files_per_folder,
    function_sizes,
    is_bare_any,
    percentile_90,
    shared_attributes,
)
from house_trace import CallCounter, Trace, median_trace

BASE = """
from abc import ABC
from typing import Generic, TypeVar

T = TypeVar("T")


class Base(ABC, Generic[T]):
    constant = 3
    _declared: int

    def __init__(self, args):
        self.args = args
        self._own, (self._given, *self._rest) = 1, (2, 3)
        self._counter: int = 0
        print(self._own, self._method())

    def _method(self):
        return self.constant

    @property
    def size(self):
        return self._given

    @staticmethod
    def helper(self):
        self._foreign = 1
"""
FACADE = "from shop.inner.base import Base as Origin\n\n__all__ = ['Origin']\n"
CHILD = """
from typing import Any

from shop import facade
from shop.facade import Origin


class Mixin:
    def mix(self) -> "Any":
        return lambda: self._rest


class Child(Mixin, Origin[int]):
    def work(this, items: list[Any], *rest: Any, flag: bool = False) -> None:
        this._counter += 1
        this._declared = 2
        print(this._given, this._declared, this.args, this.constant, this._foreign, this.size, this.mix)
        found: Any = None

        def inner(x):
            return x


class Sibling(facade.Origin):
    pass
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    source = tmp_path / "src"
    files = {"__init__.py": "", "facade.py": FACADE, "child.py": CHILD}
    inner = {"__init__.py": "", "base.py": BASE}
    for folder, contents in ((source / "shop", files), (source / "shop" / "inner", inner)):
        folder.mkdir(parents=True)
        for name, text in contents.items():
            (folder / name).write_text(text)
    return source


def names(chain: list[OurClass]) -> list[str]:
    return [known.name for known in chain]


def test_chain_follows_facades_and_counts_only_own_classes(package: Path) -> None:
    tree = SourceTree(package)
    assert names(tree.chain("shop.child.Child")) == ["Child", "Mixin", "Base"]
    assert names(tree.chain("shop.child.Sibling")) == ["Sibling", "Base"]
    assert names(tree.chain("shop.facade.Origin")) == ["Base"]
    with pytest.raises(LookupError, match=r"no class shop\.child\.Nothing"):
        tree.chain("shop.child.Nothing")


def test_relative_imports_are_followed(package: Path) -> None:
    (package / "shop" / "inner" / "near.py").write_text(
        "from .base import Base\nfrom ..child import Child\n\n\nclass Near(Base, Child):\n    pass\n"
    )
    assert names(SourceTree(package).chain("shop.inner.near.Near")) == ["Near", "Base", "Child", "Mixin"]


def test_shared_attributes_are_set_in_one_class_and_read_in_another(package: Path) -> None:
    chain = SourceTree(package).chain("shop.child.Child")
    # `_own` stays in Base. constant, size and mix are not set on self. `_foreign` is set on an argument of a static
    # method.
    assert shared_attributes(chain, frozenset()) == ["_counter", "_declared", "_given", "_rest", "args"]
    assert shared_attributes(chain) == ["_counter", "_declared", "_given", "_rest"]


def test_attribute_use_counts_augmented_assignment_as_both() -> None:
    (node,) = ast.parse("class A:\n    def f(self):\n        self.x += 1\n        self.y.z = 2\n").body
    assert isinstance(node, ast.ClassDef)
    use = attribute_use(node)
    assert use.sets == {"x"} and use.reads == {"x", "y"} and use.methods == {"f"}


def test_bare_any_is_exactly_any(package: Path) -> None:
    found = list(annotations(ast.parse(CHILD)))
    assert sorted(ast.unparse(one) for one in found) == ["'Any'", "Any", "Any", "None", "bool", "list[Any]"]
    assert sum(map(is_bare_any, found)) == 3


def test_sizes_and_folders(package: Path) -> None:
    sizes = {size.name: size.lines for size in function_sizes(SourceTree(package))}
    assert (
        sizes["shop/child.py:work"] == 8 and sizes["shop/child.py:inner"] == 2 and sizes["shop/inner/base.py:size"] == 2
    )
    assert files_per_folder(package) == {"shop": 3, "shop/inner": 2}
    largest = file_sizes(package)[0]
    assert (largest.name, largest.lines) == ("src/shop/inner/base.py", len(BASE.splitlines()))


@pytest.mark.parametrize(("values", "expected"), [([], 0), ([7], 7), (list(range(1, 11)), 9), (list(range(1, 21)), 18)])
def test_90th_percentile(values: list[int], expected: int) -> None:
    assert percentile_90(values) == expected


def figures(num_files: int, num_step_files: int) -> Figures:
    trace = {"functions": 9, "files": num_step_files, "file_changes": 5, "file_names": ["a.py"]}
    return {
        "folders": {"shop": num_files, "shop/inner": 2},
        "chains": {"Trainer": ["Trainer", "BaseTrainer"]},
        "attributes": {"Trainer": ["_one", "_two"]},
        "traces": {"DDPTrainer": {"step": trace, "save": trace}},  # type: ignore[dict-item]
        "num_annotations": 100,
        "num_bare_any": 3,
        "num_functions": 4,
        "function_median": 6.0,
        "function_p90": 20,
        "largest_functions": {"shop/a.py:f": 61, "shop/a.py:g": 60},
        "largest_files": {"src": {"src/a.py": 450}, "tests": {"tests/a.py": 601}},
    }


def test_rows_compare_figures_with_their_aims() -> None:
    verdicts = {row.name: row.is_met for row in rows_of(figures(19, 18))}
    assert verdicts == {
        "files in the largest folder": False,
        "folders / files of src": None,
        "chain of Trainer": True,
        "shared attributes of Trainer": True,
        "step of DDPTrainer: functions / files / file changes": True,
        "save of DDPTrainer: functions / files / file changes": None,
        "bare Any among annotations": False,
        "function lines, median": True,
        "function lines, 90th percentile": None,
        "lines of the largest function": False,
        "number over 60 lines: function": False,
        "lines of the largest file of src": True,
        "number over 450 lines: file of src": True,
        "lines of the largest file of tests": False,
        "number over 600 lines: file of tests": False,
    }


def test_text_and_comparison_show_values_and_names() -> None:
    before, after = rows_of(figures(53, 28)), rows_of(figures(18, 18))
    assert "_one, _two" in as_text(after, is_verbose=True) and "_one" not in as_text(after, is_verbose=False)
    lines = as_comparison(before, after).splitlines()
    assert "| files in the largest folder | 53 (shop) | 18 (shop) | at most 18 | met |" in lines
    step = "step of DDPTrainer: functions / files / file changes"
    assert f"| {step} | 9 / 28 / 5 | 9 / 18 / 5 | at most 18 files | met |" in lines


def run_file(path: Path, text: str, **given: object) -> dict[str, Callable[..., object]]:
    names: dict[str, Callable[..., object]] = {}
    exec(compile(text, str(path), "exec"), given, names)
    given.update(names)
    return names


def test_call_counter_counts_functions_files_and_changes(tmp_path: Path) -> None:
    low = run_file(tmp_path / "low.py", "def leaf(x):\n    return x\n")
    high = run_file(
        tmp_path / "high.py",
        "def top():\n    return list(map(leaf, [near(i) for i in range(3)]))\n\n\ndef near(x):\n    return x\n",
        **low,
    )
    counter = CallCounter(tmp_path)
    counter.start()
    high["top"]()
    assert counter.stop() == Trace(3, 2, 3, ["high.py", "low.py"])
    high["top"]()
    counter.start()
    assert counter.stop() == Trace(0, 0, 0, [])


def test_median_trace_takes_the_median_of_each_count() -> None:
    traces = [Trace(5, 2, 30, ["a", "b"]), Trace(6, 1, 10, ["a"]), Trace(7, 3, 20, ["a", "b", "c"])]
    assert median_trace(traces) == Trace(6, 2, 20, ["a", "b"])
