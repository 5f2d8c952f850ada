"""Completion script for zsh, with a description beside each command and option."""

import shlex
from collections.abc import Sequence

from forgather.cli.completion.specs import CommandSpec, value_cases

_SCRIPT = """\
#compdef forgather
# zsh completion of forgather. To install, write it into a directory of $fpath:
#   forgather completion zsh > ~/.zfunc/_forgather
# For this shell only, after compinit: source <(forgather completion zsh)

_forgather_words() {{
    # Sets `options`, `places`, `subcommands` and `paths` of a command; entries are name:description.
    options=() places=() subcommands=() paths=""
    case "$1" in
{commands}
    esac
}}

_forgather_values() {{
    # Sets the `values` of an option; returns 1 if it takes none.
    values=() value_is_path=""
    case "$1" in
{values}
        *) return 1 ;;
    esac
}}

_forgather() {{
    local current="${{words[CURRENT]}}" previous="${{words[CURRENT-1]}}" command word paths value_is_path
    local -a commands options places subcommands values
    if [[ $current == --*=* ]]; then
        previous="${{current%%=*}}"
        compset -P '*='
    fi
    if (( CURRENT == 2 )); then
        commands=({names})
        _describe -t commands command commands
        return
    fi
    command="${{words[2]}}"
    _forgather_words "$command"
    for word in "${{(@)words[3,CURRENT-1]}}"; do
        if [[ -n $word && -n ${{subcommands[(r)$word]}} ]]; then
            command="$command $word"
            _forgather_words "$command"
        fi
    done
    if _forgather_values "$command $previous"; then
        if [[ -n $value_is_path ]]; then
            _files
        else
            (( $#values )) && compadd -- "${{values[@]}}"
        fi
    elif [[ $current == -* ]]; then
        (( $#options )) && _describe -o option options
    else
        (( $#places )) && _describe -t arguments argument places
        [[ -n $paths ]] && _files
    fi
}}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _forgather "$@"
else
    compdef _forgather forgather
fi
"""


def script(specs: Sequence[CommandSpec]) -> str:
    """Return the completion script for zsh."""
    texts = {spec.path: spec.text for spec in specs}
    return _SCRIPT.format(
        names=" ".join(_described(spec.key, spec.text) for spec in specs if len(spec.path) == 1),
        commands="\n".join(_command_case(spec, texts) for spec in specs),
        values="\n".join(case for spec in specs for case in value_cases(spec, _choices_setting)),
    )


def _described(name: str, text: str) -> str:
    """Return an entry of `_describe`, which separates the name from its description by a colon."""
    escaped = name.replace(":", "\\:")
    return shlex.quote(f"{escaped}:{text}" if text else escaped)


def _command_case(spec: CommandSpec, texts: dict[tuple[str, ...], str]) -> str:
    settings = []
    if spec.options:
        options = (_described(name, option.text) for option in spec.options for name in option.names)
        settings.append(f"options=({' '.join(options)})")
    if spec.words:
        places = (_described(word, texts.get((*spec.path, word), "")) for word in spec.words)
        settings.append(f"places=({' '.join(places)})")
    if spec.subcommands:
        settings.append(f"subcommands=({' '.join(map(shlex.quote, spec.subcommands))})")
    if spec.takes_paths:
        settings.append("paths=yes")
    return f"        {shlex.quote(spec.key)}) {'; '.join(settings) or ':'} ;;"


def _choices_setting(choices: Sequence[str]) -> str:
    return f"values=({' '.join(map(shlex.quote, choices))})"
