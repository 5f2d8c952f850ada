"""Completion script for fish, with a description beside each command and option."""

from collections.abc import Iterator, Sequence

from forgather.cli.completion.specs import CommandSpec, OptionSpec

_HEAD = """\
# fish completion of forgather. To install:
#   forgather completion fish > ~/.config/fish/completions/forgather.fish
# For this shell only: forgather completion fish | source

function __forgather_uses
    # Whether the command line has a command, and its sub-command if there is a second argument.
    set -l words (commandline -opc)
    test (count $words) -ge 2; and test "$words[2]" = "$argv[1]"; or return 1
    test (count $argv) -eq 1; or contains -- $argv[2] $words[3..]
end

complete -c forgather -f
"""


def script(specs: Sequence[CommandSpec]) -> str:
    """Return the completion script for fish."""
    lines = [_HEAD]
    for spec in specs:
        if len(spec.path) == 1:
            lines.append(f"complete -c forgather -n __fish_use_subcommand -a {spec.key} -d {_quoted(spec.text)}")
        lines += _lines(spec, {one.path: one.text for one in specs})
    return "\n".join(lines) + "\n"


def _lines(spec: CommandSpec, texts: dict[tuple[str, ...], str]) -> Iterator[str]:
    condition = f"__forgather_uses {spec.key}"
    begin = f"complete -c forgather -n {_quoted(condition)}"
    if spec.takes_paths:
        yield f"{begin} -F"
    # Sub-commands are suggested until one is there.
    before = f"{condition}; and not __fish_seen_subcommand_from {' '.join(spec.subcommands)}"
    for word in spec.words:
        place = _quoted(before if spec.subcommands else condition)
        yield f"complete -c forgather -n {place} -a {_quoted(word)} -d {_quoted(texts.get((*spec.path, word), ''))}"
    for option in spec.options:
        yield f"{begin} {' '.join(_words(option))}"


def _words(option: OptionSpec) -> Iterator[str]:
    for name in option.names:
        yield f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
    if option.takes_value:
        yield "-r"
        yield "-F" if option.is_path else "-f"
    if option.choices:
        # Fish expands this word again, as a list of words.
        yield f"-a {_quoted(' '.join(map(_quoted, option.choices)))}"
    yield f"-d {_quoted(option.text)}"


def _quoted(text: str) -> str:
    """Return a word in single quotes, in which fish knows only two escapes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
