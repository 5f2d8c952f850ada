"""Static figures from the source text: folders, class chains, shared attributes, annotations and sizes."""

import ast
import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_WITHOUT_SELF = ("staticmethod", "classmethod")

# Attributes of contract.md, section 2. Authors of trainers rely on them, so they may be shared between classes.
PUBLIC_ATTRIBUTES = frozenset(
    name
    for line in (
        "args dist control model model_init data_collator processing_class train_dataset eval_dataset callbacks loss_fn",
        "optimizer lr_scheduler optimizer_factory lr_scheduler_factory fused_loss_factory optimizer_groups",
        "enable_activation_checkpoint_fn use_fused_loss model_splitter pipe_schedule_factory",
        "train_dataloader eval_dataloader state checkpoint_manager amp_context do_train do_eval max_steps",
        "epoch_train_steps num_processes is_local_process_zero is_world_process_zero gradient_accumulation_step",
        "_flops_per_token _stop_requested_by",
        "mesh ddp_group post_local_sgd_state fsdp_group accelerator",
        "pp_group n_pipeline_stages scheduler pipeline_modules sharing_metadata shard_index stage_indices",
        "pp_has_first_stage pp_has_last_stage pp_last_stage_rank attention_mask_creator",
        "dp_process_group pp_process_group _dp_size _mp_size",
    )
    for name in line.split()
)


# --- modules and classes


@dataclasses.dataclass(frozen=True)
class OurClass:
    """Class of the package, and the module that defines it."""

    module: str
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return self.node.name


class SourceTree:
    """Parsed modules below a source folder, by import name."""

    def __init__(self, source: Path) -> None:
        self.source = source
        self.trees = {path: ast.parse(path.read_text(), str(path)) for path in sorted(source.rglob("*.py"))}
        names = {path: _module_name(path.relative_to(source)) for path in self.trees}
        self._classes = {names[path]: _classes_of(tree) for path, tree in self.trees.items()}
        self._imports = {
            names[path]: _imports_of(tree, _package_of(names[path], path)) for path, tree in self.trees.items()
        }

    def chain(self, qualified_name: str) -> list[OurClass]:
        """Return the class and its ancestors in this tree, nearest first."""
        module, _, name = qualified_name.rpartition(".")
        first = self._find(module, name)
        if first is None:
            raise LookupError(f"{self.source} defines no class {qualified_name}, and no module re-exports it.")
        chain = [first]
        for known in chain:
            ancestors = (self._find_base(known.module, base) for base in known.node.bases)
            chain += [ancestor for ancestor in ancestors if ancestor is not None and ancestor not in chain]
        return chain

    def _find_base(self, module: str, base: ast.expr) -> OurClass | None:
        # The base of `Trainer[TArgs]` is `Trainer`.
        words = ast.unparse(base.value if isinstance(base, ast.Subscript) else base).split(".")
        for word in words[:-1]:
            module = ".".join(self._imports[module].get(word, (module, word)))
            if module not in self._classes:
                return None
        return self._find(module, words[-1])

    def _find(self, module: str, name: str) -> OurClass | None:
        """Find a class, following imports: a facade re-exports classes of other modules."""
        if module not in self._classes:
            return None
        if name in self._classes[module]:
            return OurClass(module, self._classes[module][name])
        home = self._imports[module].get(name)
        return None if home is None or home == (module, name) else self._find(*home)


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _package_of(module: str, path: Path) -> str:
    return module if path.name == "__init__.py" else module.rpartition(".")[0]


def _classes_of(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _imports_of(tree: ast.Module, package: str) -> dict[str, tuple[str, str]]:
    """Return the module and the original name for each name bound by `from ... import`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            home = _absolute(node, package)
            found.update({alias.asname or alias.name: (home, alias.name) for alias in node.names})
    return found


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parents = package.split(".")
    kept = parents[: len(parents) - node.level + 1]
    return ".".join([*kept, *([node.module] if node.module else [])])


# --- attributes


@dataclasses.dataclass(frozen=True)
class AttributeUse:
    """Names that a class sets and reads as `self.name`, and names that its body defines."""

    sets: frozenset[str]
    reads: frozenset[str]
    methods: frozenset[str]
    declares: frozenset[str]


def shared_attributes(chain: Sequence[OurClass], public: frozenset[str] = PUBLIC_ATTRIBUTES) -> list[str]:
    """Return instance attributes that one class of the chain sets and another class reads.

    An instance attribute is assigned as `self.name` somewhere in the chain. An annotation in a class body counts as an
    assignment too. Methods, properties, class constants and `public` names do not count.
    """
    uses = [attribute_use(known.node) for known in chain]
    assigned = frozenset().union(*(use.sets for use in uses))
    methods = frozenset().union(*(use.methods for use in uses))
    return sorted(name for name in assigned - methods - public if _is_shared(name, uses))


def _is_shared(name: str, uses: Iterable[AttributeUse]) -> bool:
    setters = {number for number, use in enumerate(uses) if name in use.sets | use.declares}
    readers = {number for number, use in enumerate(uses) if name in use.reads}
    return any(setter != reader for setter in setters for reader in readers)


def attribute_use(node: ast.ClassDef) -> AttributeUse:
    sets: set[str] = set()
    reads: set[str] = set()
    methods = [item for item in node.body if isinstance(item, FunctionNode)]
    for method in methods:
        owner = _self_name(method)
        for item in ast.walk(method):
            sets.update(_attributes(item, owner, ast.Store))
            reads.update(_attributes(item, owner, ast.Load))
            if isinstance(item, ast.AugAssign):
                reads.update(_attributes(item.target, owner, ast.Store))
    declares = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
    return AttributeUse(
        frozenset(sets),
        frozenset(reads),
        frozenset(method.name for method in methods),
        frozenset(target.id for target in declares if isinstance(target, ast.Name)),
    )


def _self_name(method: FunctionNode) -> str | None:
    is_static = any(isinstance(mark, ast.Name) and mark.id in _WITHOUT_SELF for mark in method.decorator_list)
    positional = [*method.args.posonlyargs, *method.args.args]
    return None if is_static or not positional else positional[0].arg


def _attributes(node: ast.AST, owner: str | None, context: type[ast.expr_context]) -> Iterator[str]:
    if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)):
        return
    if node.value.id == owner and isinstance(node.ctx, context):
        yield node.attr


# --- annotations


def annotations(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield all annotations of arguments, results and variables."""
    for node in ast.walk(tree):
        if isinstance(node, FunctionNode):
            found = node.returns
        elif isinstance(node, ast.arg | ast.AnnAssign):
            found = node.annotation
        else:
            continue
        if found is not None:
            yield found


def is_bare_any(annotation: ast.expr) -> bool:
    """Return whether an annotation is exactly `Any`, unlike `dict[str, Any]`."""
    text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
    return text in ("Any", "typing.Any")


# --- sizes


@dataclasses.dataclass(frozen=True)
class Sized:
    """Function or file, and its number of lines."""

    name: str
    lines: int


def function_sizes(tree: SourceTree) -> list[Sized]:
    """Measure all functions and methods, including nested functions, from `def` to the last line."""
    sizes = []
    for path, parsed in tree.trees.items():
        for node in ast.walk(parsed):
            if isinstance(node, FunctionNode):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                sizes.append(Sized(f"{path.relative_to(tree.source)}:{node.name}", lines))
    return sizes


def file_sizes(folder: Path) -> list[Sized]:
    """Measure the Python files below a folder, largest first."""
    sizes = [
        Sized(str(path.relative_to(folder.parent)), len(path.read_text().splitlines())) for path in folder.rglob("*.py")
    ]
    return sorted(sizes, key=lambda size: (-size.lines, size.name))


def files_per_folder(source: Path) -> dict[str, int]:
    """Count the Python files directly in each folder, including `__init__.py`, largest folder first."""
    counts = Counter(str(path.parent.relative_to(source)) for path in source.rglob("*.py"))
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def percentile_90(values: Sequence[int]) -> int:
    """Return the smallest value that at least 90% of all values do not exceed; 0 without values."""
    return sorted(values)[-(-9 * len(values) // 10) - 1] if values else 0


def median(values: Sequence[int]) -> float:
    return statistics.median(values) if values else 0.0
