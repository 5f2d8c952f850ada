"""Data files of the scripts: sentences about animals as lines, pairs, labelled words, choices, questions and summaries."""

import csv
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

ANIMALS = ["fox", "owl", "hare", "wolf", "bear", "swan", "mole", "lynx"]
VERBS = ["sees", "hears", "follows", "avoids"]
PLACES = ["river", "forest", "meadow", "mountain", "village"]
TIMES = ["today", "tomorrow", "yesterday", "often"]
WORDS = [*ANIMALS, *VERBS, *PLACES, *TIMES, "the", "near", "who"]
# Evaluation and test sets do not divide by any batch size or number of ranks of the tests.
SIZES = {"train": 16, "validation": 7, "test": 5}
IMAGE_PIXELS = 16


class Author:
    """Writer of random sentences, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def words(self) -> list[str]:
        """Return a sentence of 5 to 8 words."""
        choose = self.draw.choice
        words = ["the", choose(ANIMALS), choose(VERBS), "the", choose(ANIMALS)]
        return words + [[], ["near", "the", choose(PLACES)], [choose(TIMES)]][self.draw.randrange(3)]

    def sentence(self) -> str:
        return " ".join(self.words())


def pair(author: Author, number: int) -> dict[str, Any]:
    first, second = author.sentence(), author.sentence()
    is_related = author.draw.random() < 0.5
    return {"sentence1": first, "sentence2": first if is_related else second, "label": int(is_related)}


def topics(author: Author, number: int) -> dict[str, Any]:
    labels = ["water", "land", "air"][: 1 + number % 3]
    return {"title": author.sentence(), "body": author.sentence(), "topics": "+".join(labels)}


def tagged_words(author: Author, number: int) -> dict[str, Any]:
    words = author.words() + (author.words() if number % 4 == 3 else [])
    tags = ["ANIMAL" if word in ANIMALS else "PLACE" if word in PLACES else "O" for word in words]
    return {"tokens": words, "ner_tags": tags}


def choice(author: Author, number: int) -> dict[str, Any]:
    endings = {f"ending{index}": author.sentence() for index in range(4)}
    return {"sent1": author.sentence(), "sent2": "the", **endings, "label": author.draw.randrange(4)}


def question(author: Author, number: int) -> dict[str, Any]:
    sentences = [author.words() for _ in range(1 + number % 4)]
    words = author.draw.choice(sentences)
    context = " . ".join(" ".join(sentence) for sentence in sentences)
    answer = words[1]
    start = context.index(answer)
    question = f"who {words[2]} the {words[4]} ?"
    return {"id": f"q{number}", "question": question, "context": context, "answer": answer, "answer_start": start}


def summary(author: Author, number: int) -> dict[str, Any]:
    words = author.words()
    kept = [word for word in words if word != "the"]
    return {"document": " ".join(words), "summary": " ".join(kept[: 1 + number % 4])}


TASKS: Mapping[str, Callable[[Author, int], dict[str, Any]]] = {
    "pairs": pair,
    "tagged_words": tagged_words,
    "choices": choice,
    "questions": question,
    "summaries": summary,
}


def write_data(folder: Path) -> None:
    """Write the files `<task>_<split>.<type>` and folders with images."""
    for index, split in enumerate(SIZES):
        author = Author(index)
        lines = [author.sentence() for _ in range(SIZES[split] * 2)]
        (folder / f"lines_{split}.txt").write_text("\n".join(lines) + "\n")
        for task, make in TASKS.items():
            rows = [make(author, number) for number in range(SIZES[split])]
            (folder / f"{task}_{split}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
        _write_csv(folder / f"topics_{split}.csv", [topics(author, number) for number in range(SIZES[split])])
        _write_images(folder / f"images_{split}", SIZES[split], author.draw)


def _write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _write_images(folder: Path, number: int, draw: random.Random) -> None:
    for index in range(number):
        label = ["dark", "light", "red"][index % 3]
        (folder / label).mkdir(parents=True, exist_ok=True)
        low, high = {"dark": (0, 90), "light": (160, 255), "red": (60, 200)}[label]
        pixels = [tuple(draw.randint(low, high) for _ in range(3)) for _ in range(IMAGE_PIXELS**2)]
        image = Image.new("RGB", (IMAGE_PIXELS, IMAGE_PIXELS))
        image.putdata([(255, 0, 0) if label == "red" and i % 3 == 0 else pixel for i, pixel in enumerate(pixels)])
        image.save(folder / label / f"{index:02}.png")
