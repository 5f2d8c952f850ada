"""Suggestions for misspelt names."""

from forgather._suggestions import did_you_mean, nearest_name, suggest

NAMES = ("model", "optimizer", "scheduler")


def test_nearest_name_is_found_unless_nothing_is_similar() -> None:
    assert nearest_name("optimiser", NAMES) == "optimizer"
    assert nearest_name("weights", NAMES) is None
    assert nearest_name("weights", NAMES, cutoff=0.0) in NAMES
    assert nearest_name("optimiser", NAMES, cutoff=0.95) is None


def test_suggestion_sentence_follows_a_message_or_is_empty() -> None:
    assert did_you_mean("modle", dict.fromkeys(NAMES)) == " Did you mean 'model'?"
    assert did_you_mean("weights", NAMES) == ""
    assert (suggest("--args.seed"), suggest(None)) == (" Did you mean '--args.seed'?", "")
