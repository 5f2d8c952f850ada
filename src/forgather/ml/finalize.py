"""Export of a checkpoint as a deployable model: a Hugging Face directory, optionally quantised with torchao.

The output directory is written under a temporary name, fsynced and renamed atomically, so that it is never incomplete.
Called by `forgather finalize` and usable from Python.
"""

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from forgather.ml.checkpoint import store
from forgather.ml.checkpoint.errors import CheckpointLoadError, CheckpointNotFoundError
from forgather.ml.checkpoint.files import durable
from forgather.ml.checkpoint.files.hashed_io import HashingWriter
from forgather.ml.checkpoint.files.layout import (
    CHECKPOINTS_FOLDER,
    IN_FOLDER,
    checkpoints_root,
    counts_any_name,
    layout_of,
)
from forgather.ml.checkpoint.files.state_files import read_state, verify_file
from forgather.ml.checkpoint.foreign.ownership import require_own
from forgather.ml.checkpoint.manifest import MANIFEST_NAME, CheckpointManifest, FileRecord, read_manifest
from forgather.ml.checkpoint.weights.module_weights import (
    WeightLocation,
    load_into_modules,
    locate_weights,
    read_tensors,
    write_weights,
)
from forgather.ml.checkpoint.weights.trial_build import MODEL_CONFIG, require_plausible_model
from forgather.ml.no_init_weights import no_init_weights
from forgather.ml.quantization.files import described_model, load_quantized, save_quantized
from forgather.ml.quantization.float8 import require_torchao
from forgather.ml.quantization.layer_report import LayerReport, guessed_head, output_head
from forgather.ml.quantization.qat import convert_qat, recipe_to_base_config, require_qat

logger = logging.getLogger(__name__)

EvaluateT = Callable[[nn.Module], float]
ModelInitT = Callable[[], nn.Module]
_MODEL_COMPONENT = "model"
_AVERAGE_COMPONENT = "ema"
_INDEX_ENDING = ".index.json"
_WEIGHT_ENDINGS = (".safetensors", ".bin", _INDEX_ENDING)
_STATE_ENDINGS = (".pt", ".pth")


@dataclass(frozen=True)
class FinalizeReport:
    """Result of `finalize`: paths, sizes of the weight files in bytes, converted layers, and losses.

    `loss_before` and `loss_after` are None if no loss was measured.
    """

    checkpoint: str
    step: int | None
    output: str
    recipe: str | None
    averaged: bool
    bytes_before: int
    bytes_after: int
    layers: LayerReport | None = None
    loss_before: float | None = None
    """Loss of the weights in full precision, averaged with `ema=True`."""
    loss_after: float | None = None
    """Loss of the quantised model that was read back from the output directory."""


def finalize(
    path: str,
    output: str,
    *,
    quantize: str | None = None,
    ema: bool = False,
    model_init: ModelInitT | None = None,
    evaluate: EvaluateT | None = None,
    device: torch.device | str | None = None,
) -> FinalizeReport:
    """Write the model of a checkpoint (or of the newest checkpoint in an output directory) into a new directory.

    `quantize` is one of `QAT_RECIPES`. `ema=True` exports the averaged weights. `model_init` builds the model if it is
    not a transformers model. With `evaluate`, the loss of a quantised model is measured before and after the
    conversion; the second measurement uses the model that was read back from `output`.
    """
    checkpoint = resolve_checkpoint(path)
    check_output(output, checkpoint)
    source = _Source(checkpoint, _with_weights(checkpoint), averaged_weights(checkpoint) if ema else {})
    layers: LayerReport | None = None
    losses: tuple[float | None, float | None] = (None, None)
    if quantize is None:
        _install(output, source.write_plain)
    else:
        device = torch.device(device or best_device())
        require_torchao("quantize", quantize)
        require_qat(quantize, device.type)
        layers, losses = _quantize(source, output, quantize, model_init, evaluate, device)
    return FinalizeReport(
        checkpoint=checkpoint,
        step=source.manifest.step,
        output=output,
        recipe=quantize,
        averaged=ema,
        bytes_before=_size_of(source.location),
        bytes_after=_size_of(locate_weights(output)),
        layers=layers,
        loss_before=losses[0],
        loss_after=losses[1],
    )


def load_finalized(path: str, model_init: ModelInitT | None = None) -> nn.Module:
    """Load the model from a directory that `finalize` wrote, in evaluation mode.

    Transformers models need no `model_init`; `from_pretrained` of the model class does the same. Nothing is unpickled.
    """
    return load_quantized(path, model_init).eval()


def is_exported(path: str) -> bool:
    """Return whether a directory has a model, but no training state and no checkpoints."""
    if not os.path.isfile(os.path.join(path, MODEL_CONFIG)) or os.path.isdir(_folder_of_checkpoints(path)[0]):
        return False
    names = os.listdir(path)
    return MANIFEST_NAME not in names and not any(name.endswith(_STATE_ENDINGS) for name in names)


def resolve_checkpoint(path: str) -> str:
    """Return the path of a checkpoint.

    `path` is a checkpoint, the output directory of a run, or its folder of checkpoints. In the last two cases the
    newest complete checkpoint is chosen.
    """
    if not os.path.isdir(path):
        kind = "it is a file" if os.path.exists(path) else "there is no such directory"
        raise CheckpointNotFoundError(
            f"{path!r} is not a checkpoint: {kind}. Give a directory such as out/checkpoints/checkpoint-100, or the "
            "output directory of a run."
        )
    # A complete checkpoint wins over a folder of checkpoints inside it.
    if store.is_complete(path):
        return path
    root, _ = _folder_of_checkpoints(path)
    if not os.path.isdir(root):
        require_own(path)
        return store.open_checkpoint(path).path
    return complete_checkpoints(path)[-1].path


def complete_checkpoints(path: str) -> list[store.FoundCheckpoint]:
    """Return the complete checkpoints of an output directory or a folder of checkpoints, oldest first; at least one."""
    root, any_name = _folder_of_checkpoints(path)
    found = store.find_checkpoints(root, any_name)
    if not found:
        raise CheckpointNotFoundError(f"There is no complete checkpoint in {root}.")
    return found


def _folder_of_checkpoints(path: str) -> tuple[str, bool]:
    """Return the folder with the checkpoints of a run, and whether checkpoints may have any name there."""
    is_folder = os.path.basename(os.path.abspath(path)) == CHECKPOINTS_FOLDER
    layout = IN_FOLDER if is_folder else layout_of(path)
    return path if is_folder else checkpoints_root(path, layout), counts_any_name(layout)


def averaged_weights(checkpoint_path: str) -> dict[str, Tensor]:
    """Read the EMA weights from all files of the `ema` component; returns them by parameter name."""
    manifest = read_manifest(checkpoint_path)
    records = manifest.component_files(_AVERAGE_COMPONENT)
    if not records:
        raise CheckpointLoadError(
            f"{checkpoint_path} has no averaged weights: its components are {', '.join(manifest.components)}. Train with "
            "ema_decay, such as args.ema_decay=0.999, or use the weights without averaging."
        )
    averages: dict[str, Tensor] = {}
    for record in records:
        state = read_state(os.path.join(checkpoint_path, record.path), record)
        # Data-parallel replicas of a pipeline stage hold the same averages, so the first file wins.
        averages = {**state["averages"], **averages}
    return averages


def load_model(checkpoint_path: str, model_init: ModelInitT | None = None, ema: bool = False) -> nn.Module:
    """Load the model of a checkpoint: built by `model_init`, or by the transformers class that its files name.

    `ema=True` loads the averaged weights. No code from the checkpoint runs.
    """
    manifest = _with_weights(checkpoint_path)
    verify_model_files(checkpoint_path, manifest)
    averages = averaged_weights(checkpoint_path) if ema else {}
    # All weights are read from the checkpoint below.
    with no_init_weights():
        model = model_of_transformers(checkpoint_path) if model_init is None else model_init()
    load_into_modules(_weights_of(checkpoint_path, manifest), [model])
    _put_averages(model, averages)
    return model.eval()


def verify_model_files(checkpoint_path: str, manifest: CheckpointManifest) -> None:
    """Raise `CheckpointCorruptError` for a damaged configuration or tokenizer; reading verifies the weights."""
    for record in manifest.component_files(_MODEL_COMPONENT):
        if not record.path.endswith(_WEIGHT_ENDINGS):
            verify_file(checkpoint_path, record)


def _quantize(
    source: "_Source",
    output: str,
    recipe: str,
    model_init: ModelInitT | None,
    evaluate: EvaluateT | None,
    device: torch.device,
) -> tuple[LayerReport, tuple[float | None, float | None]]:
    """Quantise the model of a checkpoint into `output`; returns the layers, and the losses before and after."""
    model = load_model(source.checkpoint, model_init)
    _put_averages(model, source.averages)
    model.to(device)
    loss_before = None if evaluate is None else evaluate(model)
    layers = convert_qat(model, recipe, _head_of(model))
    _require_conversion(layers, recipe)
    config = recipe_to_base_config(recipe)

    def write(folder: str) -> None:
        save_quantized(folder, model, config, list(layers.skipped))
        source.copy_model_files(folder)

    _install(output, write)
    # Read the files back, although the model is in memory: the loss must be measured on the written files.
    loss_after = None if evaluate is None else evaluate(load_finalized(output, model_init).to(device))
    return layers, (loss_before, loss_after)


def model_of_transformers(checkpoint_path: str, weights_path: str | None = None) -> nn.Module:
    """Build the model that the config.json of a directory names, without its weights.

    `weights_path` is the directory with the weights, if it is another one.
    """
    description = os.path.join(checkpoint_path, MODEL_CONFIG)
    if not os.path.exists(description):
        raise CheckpointLoadError(
            f"{checkpoint_path} has no {MODEL_CONFIG}, because its model is not a transformers model. Pass model_init, a "
            "function that builds it; on the command line, --config with its model section."
        )
    build = functools.partial(described_model, checkpoint_path)
    require_plausible_model(build, description, weights_path or checkpoint_path)
    return build()


def _with_weights(checkpoint_path: str) -> CheckpointManifest:
    manifest = read_manifest(checkpoint_path)
    if manifest.weights != "included" or _MODEL_COMPONENT not in manifest.components:
        raise CheckpointLoadError(
            f"{checkpoint_path} was saved without the model's weights. Choose another checkpoint."
        )
    return manifest


def _weights_of(checkpoint_path: str, manifest: CheckpointManifest) -> WeightLocation:
    return locate_weights(checkpoint_path, manifest.components[_MODEL_COMPONENT].metadata.get("param_sharing"))


def _size_of(location: WeightLocation) -> int:
    return sum(os.path.getsize(os.path.join(location.directory, file)) for file in set(location.weight_map.values()))


def best_device() -> torch.device:
    """Return the accelerator of this machine, or the CPU."""
    # Without check_available, torch returns the accelerator it was built for, even if the machine has none.
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _put_averages(model: nn.Module, averages: Mapping[str, Tensor]) -> None:
    # Tied parameters may be averaged under any of their names.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _refuse_unknown([name for name in averages if name not in parameters])
    with torch.no_grad():
        for name, average in averages.items():
            parameters[name].copy_(average)


def _refuse_unknown(names: list[str]) -> None:
    if names:
        raise CheckpointLoadError(
            f"The averaged weights do not fit the model: it has no parameter {names[0]!r} ({len(names)} such names)."
        )


def _head_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that stay in full precision: the output head that the model names, or the guessed one."""
    named = output_head(model)
    if named:
        return named
    guessed = guessed_head(model)
    for name in guessed:
        logger.info(
            "The model does not name its output layer (get_output_embeddings). Assuming %r, which stays in full precision.",
            name,
        )
    return list(guessed.values())


def _require_conversion(layers: LayerReport, recipe: str) -> None:
    if not layers.converted:
        # One example per reason. Reversed, so that the first layer with the reason is named.
        examples = {reason: name for name, reason in reversed(layers.skipped.items())}
        reasons = "; ".join(f"{name}: {reason}" for reason, name in examples.items())
        raise ValueError(
            f"No layer of the model can be quantised by {recipe!r} ({reasons or 'it has no linear layers'}). Finalise it "
            "without quantising."
        )


# --- files


def check_output(output: str, checkpoint: str) -> None:
    """Raise FileExistsError unless a new directory can be created at `output` and would be kept there."""
    # rename(2) replaces an empty directory, so an empty one is allowed.
    is_empty = os.path.isdir(output) and not os.path.islink(output) and not os.listdir(output)
    if not output or (os.path.lexists(output) and not is_empty):
        said = f"{output!r} exists already" if output else "no name was given"
        raise FileExistsError(
            f"The model needs a new directory, but {said}. Nothing is overwritten: choose another directory, or remove it."
        )
    path, folder = os.path.abspath(output), os.path.dirname(os.path.abspath(checkpoint))
    # A training run that starts meanwhile would delete the temporary directory of `_install` there (`store.recover`).
    if os.path.commonpath([path, folder]) == folder:
        raise FileExistsError(
            f"{output!r} would be among the checkpoints in {folder}, which may be deleted. Choose a directory elsewhere."
        )
    parent = os.path.dirname(path)
    # Missing parents are created later: check the nearest directory that exists.
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK):
        raise FileExistsError(f"{output!r} cannot be created: {parent} is not a writable directory.")


def _install(output: str, write: Callable[[str], None]) -> None:
    """Call `write` on a temporary sibling directory, then rename it to `output` atomically."""
    parent, name = os.path.split(os.path.abspath(output))
    _remove_unfinished(parent, name)
    temporary = os.path.join(parent, f".tmp-{name}-{store.new_attempt()}")
    durable.make_directories(temporary)
    try:
        write(temporary)
        # The files must be durable before the rename makes them visible: after a crash a complete name means complete
        # content.
        durable.fsync_tree(temporary)
        os.rename(temporary, os.path.join(parent, name))
    # KeyboardInterrupt included: the temporary directory may be as large as the model.
    except BaseException:
        durable.remove_or_warn(temporary)
        raise
    # The rename itself is durable only once the parent directory is fsynced.
    durable.fsync_directory(parent)


def _remove_unfinished(parent: str, name: str) -> None:
    """Delete temporary directories of earlier attempts that were killed."""
    unfinished = re.compile(rf"\.tmp-{re.escape(name)}-[0-9a-f]{{12}}")
    entries = sorted(os.listdir(parent)) if os.path.isdir(parent) else []
    for entry in entries:
        if unfinished.fullmatch(entry):
            durable.remove_or_warn(os.path.join(parent, entry))


@dataclass(frozen=True)
class _Source:
    """Input of the export: a checkpoint, its manifest, and the averages that replace weights (empty without EMA)."""

    checkpoint: str
    manifest: CheckpointManifest
    averages: Mapping[str, Tensor]

    @property
    def location(self) -> WeightLocation:
        return _weights_of(self.checkpoint, self.manifest)

    def write_plain(self, folder: str) -> None:
        """Write the weights under the checkpoint's file names, one file in memory at a time, and copy the other files."""
        location = self.location
        _refuse_unknown([name for name in self.averages if location.stored_name(name) is None])
        # Tied parameters are stored once, under one of their names; averages use parameter names.
        averages = {location.stored_name(name): average for name, average in self.averages.items()}
        for file in sorted(set(location.weight_map.values())):
            names = [name for name, place in location.weight_map.items() if place == file]
            tensors = read_tensors(location, names, "cpu")
            # The files keep the dtype of the weights, whatever the dtype of the averages.
            tensors |= {name: averages[name].to(one.dtype) for name, one in tensors.items() if name in averages}
            with HashingWriter(os.path.join(folder, file)) as writer:
                write_weights(writer, tensors, location.sharing)
        self.copy_model_files(folder, (_INDEX_ENDING,))

    def copy_model_files(self, folder: str, also: tuple[str, ...] = ()) -> None:
        """Copy configuration, generation defaults and tokenizer, with verified checksums; existing files stay."""
        for record in self.manifest.component_files(_MODEL_COMPONENT):
            is_wanted = not record.path.endswith(_WEIGHT_ENDINGS) or record.path.endswith(also)
            if is_wanted and not os.path.exists(os.path.join(folder, record.path)):
                self._copy(folder, record)

    def _copy(self, folder: str, record: FileRecord) -> None:
        verify_file(self.checkpoint, record)
        with open(os.path.join(self.checkpoint, record.path), "rb") as file:
            data = file.read()
        durable.make_parents_below(folder, record.path)
        with HashingWriter(os.path.join(folder, record.path)) as writer:
            writer.write(data)
