"""Navigation of the site: parts, and their pages in order. A page of `docs/` that no part lists fails the build."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Part:
    """Part of the site."""

    title: str
    about: str
    pages: tuple[str, ...]


PARTS = (
    Part(
        "Tutorials",
        "Lessons to follow from top to bottom. Each takes a few minutes on any machine.",
        (
            "tutorials/first-run",
            "tutorials/own-model-and-data",
            "tutorials/several-gpus",
            "tutorials/crash-recovery",
        ),
    ),
    Part(
        "How-to guides",
        "Steps to one goal, for readers who know what they want.",
        (
            "installation",
            "how-to/choose-a-strategy",
            "how-to/size-memory",
            "recipes",
            "engines",
            "tools",
            "moving-from-transformers",
            "how-to/moving-from-lightning",
            "how-to/moving-from-accelerate",
            "how-to/write-a-callback",
            "custom-trainers",
            "metrics",
            "debugging",
            "importing",
        ),
    ),
    Part(
        "Reference",
        "Every class, argument, command, file and variable.",
        (
            "reference/api/index",
            "reference/arguments",
            "reference/commands",
            "trainer",
            "distributed",
            "pipeline",
            "checkpointing",
            "cli",
            "reference/checkpoint-format",
            "reference/exit-codes",
            "reference/environment-variables",
            "accelerators",
            "benchmarks",
            "security",
        ),
    ),
    Part(
        "Explanation",
        "Why things are as they are.",
        (
            "explanation/exactness",
            "explanation/sharing-patterns",
            "explanation/transaction",
            "explanation/token-weighting",
            "explanation/steps",
            "reliability",
            "architecture",
        ),
    ),
    Part(
        "Help",
        "Short answers.",
        ("help/troubleshooting", "help/faq", "help/glossary"),
    ),
)


def unlisted(folder: Path) -> list[str]:
    """Return the pages in `folder` that no part lists. Folders with a leading underscore hold no pages."""
    listed = {name for part in PARTS for name in part.pages}
    found = (path.relative_to(folder).with_suffix("").as_posix() for path in sorted(folder.rglob("*.md")))
    return [name for name in found if name not in listed and not name.startswith("_")]
