"""Completion script for bash. It needs no other package, and does not start Python when a key is pressed."""

import shlex
from collections.abc import Sequence

from forgather.cli.completion.specs import CommandSpec, value_cases

_SCRIPT = """\
# bash completion of forgather. To install:
#   forgather completion bash > ~/.local/share/bash-completion/completions/forgather
# For this shell only: source <(forgather completion bash)

_forgather_words() {{
    # Sets `options`, `words`, `subcommands` and `paths` of a command.
    options="" words="" subcommands="" paths=""
    case "$1" in
{commands}
    esac
}}

_forgather_values() {{
    # Sets the `values` of an option; returns 1 if it takes none.
    values="" value_is_path=""
    case "$1" in
{values}
        *) return 1 ;;
    esac
}}

_forgather() {{
    local current previous command word options words subcommands paths values value_is_path
    current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    COMPREPLY=()
    # Bash makes = a word of its own in --option=value.
    if [[ $current == "=" ]]; then current=""; elif [[ $previous == "=" ]]; then previous="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=( $(compgen -W "{names} --help --version" -- "$current") )
        return
    fi
    command="${{COMP_WORDS[1]}}"
    _forgather_words "$command"
    for word in "${{COMP_WORDS[@]:2:COMP_CWORD-2}}"; do
        if [[ -n $word && " $subcommands " == *" $word "* ]]; then
            command="$command $word"
            _forgather_words "$command"
        fi
    done
    if _forgather_values "$command $previous"; then
        if [[ -n $value_is_path ]]; then
            compopt -o filenames 2>/dev/null
            mapfile -t COMPREPLY < <(compgen -f -- "$current")
        else
            COMPREPLY=( $(compgen -W "$values" -- "$current") )
        fi
    elif [[ $current == -* ]]; then
        COMPREPLY=( $(compgen -W "$options" -- "$current") )
    else
        COMPREPLY=( $(compgen -W "$words" -- "$current") )
        if [[ -n $paths ]]; then
            compopt -o filenames 2>/dev/null
            mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -f -- "$current")
        fi
    fi
}}

complete -F _forgather forgather
"""


def script(specs: Sequence[CommandSpec]) -> str:
    """Return the completion script for bash."""
    return _SCRIPT.format(
        names=" ".join(spec.key for spec in specs if len(spec.path) == 1),
        commands="\n".join(map(_command_case, specs)),
        values="\n".join(case for spec in specs for case in value_cases(spec, _choices_setting)),
    )


def _command_case(spec: CommandSpec) -> str:
    parts = {
        "options": spec.option_names,
        "words": spec.words,
        "subcommands": spec.subcommands,
        "paths": ("yes",) if spec.takes_paths else (),
    }
    settings = [f"{name}={shlex.quote(' '.join(words))}" for name, words in parts.items() if words]
    return f"        {shlex.quote(spec.key)}) {' '.join(settings) or ':'} ;;"


def _choices_setting(choices: Sequence[str]) -> str:
    return f"values={shlex.quote(' '.join(choices))}"
