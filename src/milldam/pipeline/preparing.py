"""Everything a job has to know before it works: input, tokenizer, columns, encoder. What can be wrong is found here.

Reads the heads of a few files and nothing else.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from milldam.config.settings import VAL, Config, DataSet
from milldam.errors import InputError
from milldam.files import hash_bytes
from milldam.filters.judging import Filters
from milldam.input_files import LeftOut
from milldam.memory import release
from milldam.pipeline.documents import SetRules
from milldam.remote import default_folder
from milldam.run.folder import RunFolder
from milldam.run.identity import Identity
from milldam.run.planning import TOKENIZER_FACTOR, WORK_BYTES
from milldam.sources.batch import TextRules
from milldam.sources.columns import find_text_column
from milldam.sources.compression import STDIN
from milldam.sources.data_sets import Resolved, resolve_data_set
from milldam.sources.listing import InputFile, list_inputs
from milldam.sources.reading import read_unit, slice_file
from milldam.sources.units import SHARD_SIZE, Slice, Unit, plan_units
from milldam.text.cleaning import Cleaner
from milldam.text.user_functions import function_hash
from milldam.tokenizers.known import KnownTokenizer, Question, find_out, settle_encoder
from milldam.tokenizers.loading import TokenizerText, read_tokenizer, tokenizer_state
from milldam.tokenizers.proof import Choice
from milldam.tokenizers.special import SpecialTokens

SAMPLE_BYTES = 64 << 10
_FILES_SAMPLED = 3


@dataclass(frozen=True, slots=True)
class Source:
    """A data set, looked up."""

    rules: SetRules
    rows: Any
    """The slice of its documents that is wanted; None: all."""
    max_documents: int | None

    @property
    def copies(self) -> int:
        return math.ceil(self.rules.weight)

    @property
    def counted(self) -> bool:
        """Its documents must be counted before it can be said which of them are wanted."""
        return self.rows is not None or self.max_documents is not None


@dataclass(frozen=True, slots=True)
class Prepared:
    tokenizer_name: str
    tokenizer_hash: str
    question: Question
    known: KnownTokenizer
    sources: tuple[Source, ...]
    shard_size: int
    identity: Identity
    left_out: str
    """Files of the input's folders that are not read, and why."""
    preparation: Preparation
    tokenizer_state: str | None = None
    """Of its files, before they were read."""

    @property
    def tokenizer_json(self) -> str:
        return self.known.json

    @property
    def special(self) -> SpecialTokens:
        return self.known.special

    @property
    def vocab_size(self) -> int:
        return self.known.vocab_size

    @property
    def tokenizer_bytes(self) -> int:
        """What it will take in memory, as measured of many."""
        return TOKENIZER_FACTOR * len(self.tokenizer_json)

    @property
    def sets(self) -> tuple[SetRules, ...]:
        return tuple(source.rules for source in self.sources)

    @property
    def partitions(self) -> int:
        """Into how many the hashes of dedup are cut."""
        from milldam.dedup.fingerprints import partition_count

        return partition_count(self.identity.input["bytes"])

    def units(self, folder: RunFolder) -> Iterator[Unit]:
        """Every unit in plan order."""
        return planned_units(folder, self.sources, self.shard_size)

    def input_changed(self) -> bool:
        """Whether the input is another one now."""
        return self.preparation.list_input() != self.identity.input


class Preparation:
    """Looks up what the configuration names, into a run folder."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config, self._folder = config, folder
        self._resolved = self._resolve_all()
        self.left_out = LeftOut()
        """Files of the input's folders that are not read."""

    def prepare(self) -> Prepared:
        self._try_rules()
        input_identity = self.list_input()
        shard_size = self._config.shard_bytes or SHARD_SIZE
        sources = self.look_up_sources()
        # Before it is loaded: a change in between makes it another state than that of the store.
        state = tokenizer_state(self._config.tokenizer_rules.path)
        # The loaded tokenizer is needed for this step alone: it must not stay in memory.
        prepared = self._with_tokenizer(self._read_tokenizer(), input_identity, shard_size, sources)
        release()
        return dataclasses.replace(prepared, tokenizer_state=state)

    def _try_rules(self) -> None:
        """What rules name must be there: functions, the language model."""
        Filters(self._config.filters)
        if self._config.clean_rules is not None:
            Cleaner(self._config.clean_rules)
        if self._config.filters.language is not None:
            from milldam.filters.language import unload_model

            unload_model()

    def list_input(self) -> dict[str, Any]:
        """List the input as it is now; its number, size and fingerprint."""
        self.left_out = LeftOut()
        return self._folder.inputs.write(self._files())

    def _resolve_all(self) -> list[list[Resolved]]:
        return [_resolve(one) for one in self._config.sources]

    def _heads(self, number: int) -> Iterator[InputFile]:
        """Files of a data set whose heads can be looked at."""
        return listed_files(self._folder, number)

    def look_up_sources(self) -> tuple[Source, ...]:
        """The data sets of the configuration, with what was found of them; the input must be listed."""
        return tuple(self._source(number) for number in range(len(self._config.sources)))

    def _files(self) -> Iterator[tuple[int, InputFile]]:
        if self._folder.task is not None:
            # As it was when the run was prepared: not every task need ask for every file. Who finishes does.
            yield from ((entry.pop("dataset", 0), InputFile(**entry)) for entry in self._folder.inputs.planned())
            return
        for number, resolved in enumerate(self._resolved):
            for one in resolved:
                yield from ((number, file) for file in list_inputs(one.inputs, one.input_format, self.left_out))

    def _source(self, number: int) -> Source:
        config, given = self._config, self._config.sources[number]
        rules = TextRules(given.documents, given.separator, given.text_column, config.invalid_utf8, config.strict)
        slices = (Slice(file.path, file.format, file.compression) for file in self._heads(number))
        before = len(config.validation_sets)
        place = f"validation.{number}" if number < before else f"datasets.{number - before}"
        column = find_text_column(slices, given.text_column, str(self._folder.folder), f"{place}.text_column")
        split = VAL if number < before else None
        text = dataclasses.replace(rules, text_column=column)
        return Source(SetRules(text, given.weight, split), self._resolved[number][0].rows, given.max_documents)

    def _read_tokenizer(self) -> TokenizerText:
        rules = self._config.tokenizer_rules
        if rules.train is not None and not Path(rules.path).exists():
            raise InputError(
                f"{rules.path}: no tokenizer there yet. Train it first, with the same file: milldam train-tokenizer"
            )
        return read_tokenizer(rules.path)

    def _with_tokenizer(
        self, text: TokenizerText, input_identity: dict[str, Any], shard_size: int, sources: tuple[Source, ...]
    ) -> Prepared:
        rules = self._config.tokenizer_rules
        plain = rules.special_text == "plain"
        question = Question(text, rules.encoder, rules.bos, rules.eos, plain, self._samples(sources[-1]))
        known = find_out(question, known_tokenizers())
        tokenizer_hash = hash_bytes(known.json.encode())
        settled = {
            "tokenizer": tokenizer_hash,
            "bos": known.special.bos_token,
            "eos": known.special.eos_token,
            "shard_size": shard_size,
        }
        return Prepared(
            tokenizer_name=text.name,
            tokenizer_hash=tokenizer_hash,
            question=question,
            known=known,
            sources=sources,
            shard_size=shard_size,
            identity=Identity(settled | self._settings(sources), input_identity, text.name),
            left_out=str(self.left_out),
            preparation=self,
        )

    def _settings(self, sources: tuple[Source, ...]) -> dict[str, Any]:
        """The configuration's settings, with what "auto" stands for settled, so that it is compared as what it is."""
        settings = self._config.settings()
        columns = [source.rules.text.text_column for source in sources]
        for one, column in zip(settings["validation"] + settings["datasets"], columns, strict=True):
            one["text_column"] = column
        for stage in ("clean", "filters"):
            function = (settings[stage] or {}).get("function")
            if function is not None:
                settings[stage]["function_hash"] = function_hash(function)
        return settings

    def _samples(self, source: Source) -> list[str]:
        """The first documents of a data set, up to some tens of kilobytes."""
        if STDIN in self._config.sources[-1].paths:
            return []
        texts: list[str] = []
        size = 0
        lenient = dataclasses.replace(source.rules.text, strict=False, invalid_utf8="reject")
        number = len(self._config.sources) - 1
        for file in itertools.islice(self._heads(number), _FILES_SAMPLED):
            if file.format in ("parquet", "arrow") and next(iter(slice_file(file, 1, lenient))).unpacking > WORK_BYTES:
                continue  # the budget is yet to be held against that
            head = Unit(0, (Slice(file.path, file.format, file.compression),))
            for batch in read_unit(head, lenient, lambda reject: None, str(self._folder.folder)):
                for text in batch.texts:
                    texts.append(text.as_py()[:SAMPLE_BYTES])
                    size += len(texts[-1])
                    if size > SAMPLE_BYTES:
                        return texts
        return texts


def wanted_rows(source: Source, total: int) -> tuple[int, int]:
    """(first, behind the last) of a data set's documents that are wanted, when it has `total`."""
    first, stop = source.rows.bounds(total) if source.rows is not None else (0, total)
    return first, stop if source.max_documents is None else min(stop, first + source.max_documents)


def _resolve(one: DataSet) -> list[Resolved]:
    return [resolve_data_set(path, one.split, one.subset, input_format=one.input_format) for path in one.paths]


def listed_files(folder: RunFolder, dataset: int) -> Iterator[InputFile]:
    """The files of one data set, as just listed."""
    return (InputFile(**file) for file in folder.inputs.listed(dataset))


def planned_units(folder: RunFolder, sources: tuple[Source, ...], shard_size: int) -> Iterator[Unit]:
    """Every unit in plan order: data set after data set, each repetition on its own."""
    index = 0
    for number, source in enumerate(sources):
        slicer = partial(slice_file, rules=source.rules.text)
        first = index
        for copy in range(source.copies):
            behind = index - first
            files = listed_files(folder, number)
            for unit in plan_units(files, shard_size, slicer, first_index=index, dataset=number, copy=copy):
                yield dataclasses.replace(unit, original=unit.index - behind) if copy else unit
                index += 1


def pick_encoder(prepared: Prepared) -> Choice:
    """The encoder to encode with, proved on samples."""
    return settle_encoder(prepared.question, prepared.known, known_tokenizers())


def known_tokenizers() -> Path:
    """Where what is known of tokenizers is kept."""
    return default_folder() / "tokenizers"
