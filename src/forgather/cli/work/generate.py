"""Work of `forgather generate`: reads prompts, and prints texts as they are generated.

Generated text is untrusted: control characters become visible characters before they reach the terminal.
"""

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from forgather._terminal_text import printable
from forgather.cli.command_line import DONE
from forgather.cli.errors import UsageError
from forgather.cli.output import note, print_json
from forgather.cli.process_setup import show_own_messages
from forgather.config import builders, model_builders
from forgather.config.schema import Configuration
from forgather.config.stored import read_configuration
from forgather.ml.checkpoint.errors import CheckpointNotFoundError
from forgather.ml.finalize import is_exported, resolve_checkpoint
from forgather.ml.trainer.callbacks.display import get_console
from forgather.ml.trainer.setup.devices import require_device
from forgather.tools.checkpoints.paths import find_checkpoint
from forgather.tools.generation import GeneratedText, Sampling, TextGenerator, load_generator, with_sample

_STDIN = "-"
_NARROWEST_COLUMN = 32
_JSON_LINES = (".jsonl", ".json", ".ndjson")


def generate(options: argparse.Namespace) -> int:
    """Generate texts as the command line requests; returns the exit code."""
    show_own_messages()
    sampling = _sampling(options)
    try:
        checkpoints = [
            path if is_exported(path) else resolve_checkpoint(find_checkpoint(path)) for path in options.paths
        ]
        require_device(options.device)
    except (CheckpointNotFoundError, ValueError) as error:
        raise UsageError(str(error)) from None
    prompts = _prompts(options.prompt, options.prompts_file)
    console = get_console()
    is_wide = console.is_terminal and console.width >= _NARROWEST_COLUMN * len(checkpoints)
    in_columns = len(checkpoints) > 1 and is_wide and not options.json
    generators = _generators(checkpoints, options)
    if options.json:
        texts = [text for generator in generators for text in _texts(generator, prompts, sampling, options.num_samples)]
        print_json("generate/1", {"texts": [dataclasses.asdict(text) for text in texts]})
    elif in_columns:
        _show_columns(generators, prompts, sampling, options.num_samples)
    else:
        for number, generator in enumerate(generators):
            if len(checkpoints) > 1:
                console.print(Text(("\n" if number else "") + _label(generator), style="bold"), soft_wrap=True)
            _stream_all(generator, prompts, sampling, options.num_samples)
    return DONE


def _sampling(options: argparse.Namespace) -> Sampling:
    try:
        return Sampling(
            max_new_tokens=options.max_new_tokens,
            do_sample=not options.greedy and options.temperature != 0,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
        )
    except ValueError as error:
        raise UsageError(f"{error}.") from None


def _generators(checkpoints: Sequence[str], options: argparse.Namespace) -> Iterator[TextGenerator]:
    """Load the models one by one, so that only one of them is in memory."""
    configuration = None if options.config is None else read_configuration("", options.config)
    for checkpoint in checkpoints:
        keywords = {} if configuration is None else _parts(configuration)
        yield load_generator(checkpoint, ema=options.ema, device=options.device, **keywords)


def _parts(configuration: Configuration) -> dict[str, Any]:
    """Return tokenizer and model builder of a configuration that the user trusts."""
    tokenizer = builders.build_tokenizer(configuration.tokenizer)
    has_class = configuration.model.class_path is not None
    model_init = model_builders.model_builder(configuration.model, tokenizer) if has_class else None
    return {"tokenizer": tokenizer, "model_init": model_init}


# --- prompts


def _prompts(given: Sequence[str], path: str | None) -> list[str]:
    if [*given, path].count(_STDIN) > 1:
        raise UsageError("stdin (-) can be read only once: use - for one prompt or for the file of prompts.")
    prompts = [_from_stdin() if prompt == _STDIN else prompt for prompt in given]
    if path is not None:
        prompts += _prompts_in(path)
    if not prompts:
        raise UsageError(f"{path} has no prompts: expected one per line.")
    return prompts


def _from_stdin() -> str:
    # `echo text |` ends with a line break that is not part of the prompt.
    return sys.stdin.read().removesuffix("\n")


def _prompts_in(path: str) -> list[str]:
    """Return the prompts of a file, one per line that is not empty."""
    try:
        if path == _STDIN:
            lines = sys.stdin.read().splitlines()
        else:
            with open(path, encoding="utf-8") as file:
                lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"The prompts in {path!r} cannot be read: {reason}.") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not path.lower().endswith(_JSON_LINES):
        return [line for _, line in numbered]
    return [_prompt_in_json(line, f"{path}, line {number}") for number, line in numbered]


def _prompt_in_json(line: str, place: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        entry = None
    prompt = entry.get("prompt") if isinstance(entry, Mapping) else None
    if not isinstance(prompt, str):
        raise UsageError(f'{place}: expected a JSON object with a text as "prompt", such as {{"prompt": "Once"}}.')
    return prompt


# --- output


def _texts(
    generator: TextGenerator, prompts: Sequence[str], sampling: Sampling, num_samples: int
) -> Iterator[GeneratedText]:
    for prompt in prompts:
        for sample in range(num_samples):
            yield generator.generate(prompt, sampling, sample)


def _stream_all(generator: TextGenerator, prompts: Sequence[str], sampling: Sampling, num_samples: int) -> None:
    """Print the continuations of all prompts, each token when it is generated."""
    is_first = True
    for prompt in prompts:
        for sample in range(num_samples):
            if not is_first:
                print()
            is_first = False
            _stream(generator, prompt, with_sample(sampling, sample))


def _stream(generator: TextGenerator, prompt: str, sampling: Sampling) -> None:
    stream = generator.stream(prompt, sampling)
    try:
        get_console().print(Text(printable(prompt), style="cyan"), end="", soft_wrap=True)
        sys.stdout.flush()
        for piece in stream:
            # Not through rich, which would wrap lines.
            sys.stdout.write(printable(piece))
            sys.stdout.flush()
    finally:
        # Also after Ctrl-C, so that the message begins on its own line.
        sys.stdout.write("\n")
    if stream.finish_reason == "context":
        note(f"The text ends here, because the model has only {generator.context_length} positions.")


def _show_columns(
    generators: Iterator[TextGenerator], prompts: Sequence[str], sampling: Sampling, num_samples: int
) -> None:
    """Print a table with a column per checkpoint and a row per text."""
    columns: dict[str, list[GeneratedText]] = {}
    for number, generator in enumerate(generators):
        label = _label(generator)
        note(f"generating with {label}")
        texts = list(_texts(generator, prompts, sampling, num_samples))
        # Checkpoints of different runs may have the same step.
        columns[label if label not in columns else f"{label} ({number + 1})"] = texts
    table = Table(box=None, pad_edge=False, padding=(0, 2, 1, 0), header_style="bold")
    for label in columns:
        table.add_column(Text(label), ratio=1, overflow="fold")
    for row in zip(*columns.values(), strict=True):
        table.add_row(
            *(Text(printable(one.prompt), style="cyan") + Text(printable(one.text), style="default") for one in row)
        )
    get_console().print(table)


def _label(generator: TextGenerator) -> str:
    name = os.path.basename(os.path.normpath(generator.checkpoint))
    return printable(name if generator.step is None else f"step {generator.step}  {generator.checkpoint}")
