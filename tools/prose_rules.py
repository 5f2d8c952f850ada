"""Prose rules: markers of translated English, long sentences, clause headings, spelling, docstring mood and terms.

Each rule is a function from a passage (see `prose_text.py`) to its faults. `prose.py` adds them up. The markers were
chosen by comparison: each is at least five times as frequent in translated prose as in packages that native speakers
wrote, or is listed by the project's rule for prose.
"""

import dataclasses
import re
from collections.abc import Iterator

from prose_text import COMMENT, DOCSTRING, HEADING, Passage, plain, words

MAX_SENTENCE_WORDS = 35
MAX_PAGE_LINE = 120
MODULE_DOCSTRING_LINES = (2, 6)

MARKER, LONG, CLAUSE, TERM, SPELLING, MOOD, STOP, LENGTH = (
    "marker",
    "long sentence",
    "clause heading",
    "module docstring without a technical term",
    "American spelling",
    "docstring mood",
    "capital or full stop",
    "module docstring length",
)
RULES = (MARKER, LONG, CLAUSE, TERM, SPELLING, MOOD, STOP, LENGTH)
# What one fault of each rule adds to a passage in the list of the worst.
WEIGHTS = {MARKER: 3, LONG: 2, CLAUSE: 4, TERM: 2, SPELLING: 1, MOOD: 1, STOP: 1, LENGTH: 1}

MARKERS = (
    r"that of",
    r"those of",
    r"those that",
    r"(?:is|are|was|were|as) those",
    r"(?:of|in|by|from|at|under) which",
    r"whose",
    r"(?:goes|go|went|going) on",
    r"so many",
    r"anew",
    r"nobody",
    r"whoever",
    r"whomever",
    r"none that",
    r"there is none",
    r"(?:is|are|was|were) to be",
    r"(?:is|are|was|were) not there",
    r"no longer one",
    r"as (?:it|they) stands?",
    r"(?:hear|hears|heard|know|knows|knew|known|tell|tells|told|speak|speaks) of",
    r"of (?:its|their|our) own",
    r"of ours",
    r"need not",
    r"but for",
    r"in place of",
    r"(?:is|are|and|of) what",
    r"what (?:a|an|is|are|was|it|they|this)",
    r"ones? that",
    r"alike",
    r"the place of",
    r"by itself",
    r"the present \w+",
)
_MARKER = re.compile(r"\b(?:" + "|".join(MARKERS) + r")\b", re.IGNORECASE)

# Words that people search for. A module docstring has at least one of them.
_TERM_LIST = """
    accelerate accumulation activation adam adamw agent agreement all-gather all-reduce allocator amp argparse
    argument arguments ast atomic attention autocast autograd averaging backend backward barrier batch batches
    batching benchmark bf16 bfloat16 bit-exact bitwise broadcast buffer buffers callback callbacks checkpoint
    checkpoints checksum checksums cli clip clipping clock codec collate collation collator collective collectives
    command compile compiler config configuration console coordinator cross-entropy ctrl-c cuda dataclass dataloader
    dataset datasets dcp ddp deadlock decoder decoding deserialisation device devices digest digests dispatch
    dispatcher distributed docstring dropout dtype dtypes ema embedding encoder encoding entropy environment epoch
    evaluation event events exception exceptions export facade filesystem finalize fixture flush fork forward fp16
    fp32 fp8 fqn fqns fsdp fsdp2 fsync fused generation generator generators gloo gpu gradient gradients graph
    graphs hash hashes hook hooks hsdp hugging index int4 int8 interpolation interrupt iterable json jsonl kernel
    label labels latency launcher layer layers layout lazy learning-rate lock log logger logging logits loop loss
    losses main-process manifest mask memory merge mesh meta-device metadata metric metrics micro-batch
    micro-batches microbatch mixed-precision moments mutex nan nccl null-object offload offloading oom optimizer
    optimizers overhead packing padding parameter parameters parser parsing permutation pickle pickles pipeline
    pipelines planner plateau port position-ids preemption prefetch prefetching profile profiler profiling protocol
    qat quantisation queue rank ranks read-ahead registry rename rendezvous replica replicas reproducibility resume
    retention rng rotation safetensors sampler samplers sampling schedule scheduler schedulers schedules schema seed
    seeding seeds serialisation shape shapes shard sharded sharding shards shuffle shuffling shutdown sigkill signal
    signals sigterm snapshot socket stage stages state-dict state_dict store stream streams subprocess subset
    symlink synchronisation tensor tensorboard tensors thread threads throughput tied timeline timeout timeouts
    timestamp token token-weighted tokenizer tokens topology torch torchrun traceback trainer trainers transaction
    transformers unpickler unpickling unwrap validation vocab vocabulary warm-up warmup warning warnings watchdog weight
    weights worker workers yaml zero-bubble
"""
TERMS = frozenset(_TERM_LIST.split())

# -ize where British English writes -ise, without the names of things in torch and transformers (optimizer, tokenizer).
_AMERICAN = re.compile(
    r"\b(?:behavior|color|favor|honor|neighbor|center|gray|canceled|canceling|labeled|labeling|modeled|modeling|"
    r"traveled|fulfill|catalog|analog|defense|offense|judgment|skeptical|aluminum|"
    r"(?:initial|synchron|serial|deserial|normal|organ|optim|minim|maxim|recogn|summar|material|quant|token|custom|"
    r"parallel|final|util|visual|local|general|special|random|emphas|real|author|standard|equal|memor|penal|character|"
    r"categor|digit|item|central|parametr|fact|vector|stabil|symbol|sanit|regular|reorgan|priorit|categor|canonical|"
    r"capital|formal|harmon|immun|mobil|modern|neutral|popular|public|tr?aumat|verbal)iz(?:e|es|ed|ing|ation|ations))\b",
    re.IGNORECASE,
)

# Options, dotted names and the command `forgather finalize` are names, not prose.
_NAME = re.compile(r"--\w[\w-]*|\bforgather finalize\b|\w+(?:\.\w+)+|^(?:quantize|finalize) CODE")

_CLAUSE_START = re.compile(
    r"^(?:what|when|where|who|why|how|if|whether|which|whose|that|while|because|and|but)\b", re.I
)
_CLAUSE_VERB = re.compile(
    r"\b(?:is|are|was|were|has|have|had|does|do|did|can|cannot|could|must|may|might|should|would|will|goes|comes|"
    r"takes|makes|gives|gets|keeps|knows|says|tells|becomes|happens|begins|stays|remains|"
    r"holds|waits)\b",
    re.IGNORECASE,
)
_NOUN_START = re.compile(
    r"^(?:the|a|an|all|each|every|one|no|nothing|its|their|this|these|those|that|what|which|whether|where|when|who|how|"
    r"why|whose|as|in|on|of|for|from|to|by|with|at|before|after|same|true|false|none|text|name|names|number)\b",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Fault:
    rule: str
    passage: Passage
    text: str


def markers_in(sentence: str) -> list[str]:
    return [found.group() for found in _MARKER.finditer(sentence)]


def faults_of(passage: Passage) -> Iterator[Fault]:
    """Yield the faults of one passage, rule by rule."""
    for sentence in passage.sentences():
        for marker in markers_in(sentence):
            yield Fault(MARKER, passage, f"{marker}: {sentence}")
        if len(words(sentence)) > MAX_SENTENCE_WORDS:
            yield Fault(LONG, passage, sentence)
        for found in _AMERICAN.finditer(_NAME.sub("", sentence)):
            yield Fault(SPELLING, passage, f"{found.group()}: {sentence}")
    if passage.kind == HEADING and is_clause(plain(passage.text)):
        yield Fault(CLAUSE, passage, passage.text)
    if passage.kind == DOCSTRING:
        yield from _docstring_faults(passage)
    if passage.kind == COMMENT and not _has_capital_and_stop(passage.text):
        yield Fault(STOP, passage, passage.text)


def _docstring_faults(passage: Passage) -> Iterator[Fault]:
    summary = passage.text.split("\n\n")[0].strip()
    if passage.is_module_docstring and passage.file.startswith("src/"):
        yield from _module_faults(passage)
    elif passage.is_verbal and _NOUN_START.match(summary):
        yield Fault(MOOD, passage, summary)
    if not _has_capital_and_stop(summary):
        yield Fault(STOP, passage, summary)


def _module_faults(passage: Passage) -> Iterator[Fault]:
    if not has_term(passage.text.split("\n\n")[0]):
        yield Fault(TERM, passage, passage.text)
    low, high = MODULE_DOCSTRING_LINES
    if not low <= len([line for line in passage.text.splitlines() if line.strip()]) <= high:
        yield Fault(LENGTH, passage, passage.text)


def is_clause(heading: str) -> bool:
    """Return whether a heading is a clause ("How it works") and not a topic ("Rejected combinations")."""
    return bool(_CLAUSE_START.search(heading) or _CLAUSE_VERB.search(heading) or heading.endswith("?"))


def has_term(text: str) -> bool:
    return any(word.lower() in TERMS or word.removesuffix("'s").lower() in TERMS for word in words(text))


def _has_capital_and_stop(text: str) -> bool:
    # A first word in lower case is fine where it is a name of the code: backticks, calls, dotted or underscored names.
    first = text.split()[0] if text.split() else ""
    has_capital = not re.match(r"[a-z]+[,;:.]?$", first)
    return has_capital and text.rstrip().endswith((".", "!", "?", ":", "`", ")", '"'))
