"""The job of `milldam train-tokenizer`: a seeded sample of the datasets of a configuration -> a tokenizer.

Reads about eight times the sample at most, from units spread over the input; which of their documents are taken is
decided by the hash of their text. So the tokenizer depends on the input and the configuration alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from milldam.config.settings import Config
from milldam.errors import ConfigError, InputError, ResourceError, Setting
from milldam.memory import Budget, format_size, parse_size, usage
from milldam.pipeline.documents import read_documents
from milldam.pipeline.judging import SAMPLE, below, content_keys
from milldam.pipeline.preparing import Input
from milldam.run.folder import RunFolder
from milldam.sources.units import SAMPLED_SHARD
from milldam.stores.kinds import TOKENS
from milldam.text.arrays import byte_count
from milldam.tokenizers.training import TrainedTokenizer, train_tokenizer, training_bytes

READ_PER_SAMPLE = 8
SAMPLE_SURPLUS = 1.1
"""A little more than the share that should be enough: documents are of unequal size."""


def train_from_config(config: Config) -> TrainedTokenizer:
    """Train and save the tokenizer that `tokenizer.train` describes, to `tokenizer.path`."""
    tokenizer, rules = config.tokenizer_rules, config.tokenizer_rules.train
    if rules is None:
        raise ConfigError("tokenizer.train is missing: it says how large the vocabulary shall be.")
    if Path(tokenizer.path).exists() and not config.overwrite:
        message = f"{tokenizer.path} exists already. Replace it with "
        raise ConfigError(message, Setting("overwrite", True), ", or change tokenizer.path.")
    sample_bytes = parse_size(rules.sample)
    budget = Budget.of(config.memory)
    needed = usage().anonymous + training_bytes(sample_bytes, rules.vocab_size)
    if needed > budget.limit_bytes:
        raise ResourceError(
            f"A budget of {format_size(budget.limit_bytes)} is too small to train on {format_size(sample_bytes)}: "
            f"it takes about {format_size(needed)}.\nRaise memory, or lower tokenizer.train.sample."
        )
    with (
        tempfile.TemporaryDirectory(prefix="milldam-train-") as folder,
        RunFolder(Path(folder) / "sample", TOKENS) as run,
    ):
        return train_tokenizer(
            _sample(config, run, sample_bytes),
            vocab_size=rules.vocab_size,
            special_tokens=rules.special_tokens,
            out=Path(tokenizer.path),
            memory_bytes=budget.limit_bytes - usage().anonymous,
        )


def _sample(config: Config, run: RunFolder, sample_bytes: int) -> Iterator[pa.LargeStringArray]:
    """Texts of about the size of the sample."""
    input = Input(config, run)
    input.look()
    sets = input.sets()
    every = input.units(sets, SAMPLED_SHARD)
    units = [unit for unit in every if unit.copy == 0 and sets[unit.dataset].split is None]
    # Evenly spread over the input.
    units = units[:: max(1, round(sum(unit.unpacked_bytes for unit in units) / (sample_bytes * READ_PER_SAMPLE)))]
    available = sum(unit.unpacked_bytes for unit in units)
    share = min(1.0, SAMPLE_SURPLUS * sample_bytes / max(1.0, available))
    taken = 0
    for unit in units:
        for batch in read_documents(unit, sets[unit.dataset], config.clean_rules):
            pieces = (pa.array([text], pa.large_string()) for text, _ in batch.pieces or ())
            for texts in [batch.texts] if batch.pieces is None else pieces:
                texts = texts.filter(pa.array(below(content_keys(texts, config.seed, SAMPLE), share)))
                taken += byte_count(texts)
                if len(texts):
                    yield texts
                if taken >= sample_bytes:
                    return
    if not taken:
        raise InputError("No text in the sample: nothing to train on.")
