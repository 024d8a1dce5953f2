"""Everything a job has to know before it works: input, tokenizer, columns, encoder. What can be wrong is found here.

Reads the heads of a few files and nothing else.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.config.settings import VAL, Config
from milldam.errors import InputError
from milldam.files import hash_bytes, user_cache
from milldam.input_files import LeftOut
from milldam.memory import parse_size, release
from milldam.pipeline.documents import Reading, SetRules, UnitReader
from milldam.pipeline.judging import preload_rules
from milldam.pipeline.starting import shard_size_of
from milldam.run.folder import RunFolder
from milldam.run.pools import TOKENIZER_FACTOR, WORK_BYTES
from milldam.run.units import Identity
from milldam.sources.batch import TextRules
from milldam.sources.columns import find_text_column, head_values
from milldam.sources.compression import STDIN
from milldam.sources.data_sets import resolve_data_set
from milldam.sources.reading import slice_file
from milldam.sources.units import InputFile, Slice, Unit, list_inputs, plan_units
from milldam.tokenizers.loading import SpecialTokens, TokenizerText, read_tokenizer, tokenizer_state
from milldam.tokenizers.proof import KNOWN_TOKENIZERS, Choice, KnownTokenizer, Question, find_out, settle_encoder

if TYPE_CHECKING:
    from milldam.chat.loading import TemplateSource
    from milldam.chat.reading import ChatRecipe
    from milldam.dedup.preferred import ValueField
    from milldam.pipeline.evaluation_sets import Evaluation
    from milldam.pipeline.index_lookup import IndexLookup
    from milldam.rules import ChatRules, PreferredField

SAMPLE_BYTES = 64 << 10
_CHAT_HEAD = 2 * SAMPLE_BYTES
_FILES_SAMPLED = 3
"""The folder of the cache in which what is known of tokenizers is kept."""


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset, looked up."""

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
    evaluation: Evaluation | None = None
    """The evaluation sets that are kept out."""
    index: IndexLookup | None = None
    """The index whose documents are dropped in one pass."""
    tokenizer_state: str | None = None
    """Of its files, before they were read."""
    value: ValueField | None = None
    """The field by which near-duplicates stay."""
    preferred: str = ""
    """Which of them does, in words."""

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

    @property
    def index_key(self) -> int:
        """What the keys of units take in of the index that they are compared with; 0: there is none."""
        return int(self.identity.input.get("index", "0")[:16], 16)

    @property
    def conversations(self) -> str:
        """The forms of conversations, and how they become texts; empty: there are none."""
        recipes = [source.rules.chat for source in self.sources if source.rules.chat is not None]
        forms = "; ".join(dict.fromkeys(str(one.form) for one in recipes))
        return f"{forms}, by {recipes[0].template.origin}" if recipes else ""

    def chat_facts(self, counts: Counter[str]) -> dict[str, Any] | None:
        """What a store tells of its conversations; None: it has none."""
        recipe = self.sources[-1].rules.chat
        if recipe is None:
            return None
        known = dict.fromkeys(("conversations", "turns", "trained_tokens"), 0)
        return {"form": recipe.form.name, "pairs": recipe.sides == 2} | known | dict(counts)

    def choose_encoder(self) -> Choice:
        """The encoder to encode with, proved on samples."""
        return settle_encoder(self.question, self.known, user_cache() / KNOWN_TOKENIZERS)

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
        self._resolved = [
            [resolve_data_set(path, one.split, one.subset, input_format=one.input_format) for path in one.paths]
            for one in config.sources
        ]
        self.left_out = LeftOut()
        """Files of the input's folders that are not read."""
        self._evaluation: Evaluation | None = None
        if config.evaluation_sets:
            from milldam.pipeline.evaluation_sets import Evaluation

            self._evaluation = Evaluation(config.evaluation_sets, str(folder.folder))
        self._index: IndexLookup | None = None
        if config.index_rules is not None:
            from milldam.pipeline.index_lookup import IndexLookup

            self._index = IndexLookup(config, config.index_rules)

    def prepare(self) -> Prepared:
        # What rules name must be there: functions, the language model.
        preload_rules(self._config.filters, self._config.clean_rules)
        if self._config.filters.language is not None:
            from milldam.filters.language import unload_model

            unload_model()
        input_identity = self.list_input()
        shard_size = shard_size_of(self._config)
        sources = self.look_up_sources()
        value = self._find_value_field()
        # Before it is loaded: a change in between makes it another state than that of the store.
        state = tokenizer_state(self._config.tokenizer_rules.path)
        # The loaded tokenizer is needed for this step alone: it must not stay in memory.
        prepared = self._with_tokenizer(self._read_tokenizer(), input_identity, shard_size, sources, value)
        release()
        return dataclasses.replace(prepared, tokenizer_state=state)

    def list_input(self) -> dict[str, Any]:
        """List the input as it is now; its number, size and fingerprint."""
        self.left_out = LeftOut()
        state = self._folder.inputs.write(self._files())
        if self._index is not None:
            return self._index.with_state(state)
        return state if self._evaluation is None else state | {"evaluation": self._evaluation.digest}

    def look_up_sources(self) -> tuple[Source, ...]:
        """The datasets of the configuration, with what was found of them; the input must be listed."""
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
        rules = TextRules(
            given.documents,
            given.separator,
            given.text_column,
            config.invalid_utf8,
            config.strict,
            only_file=len(list(itertools.islice(listed_files(self._folder, number), 2))) == 1,
            max_document_bytes=parse_size(config.max_document_bytes),
        )
        slices = (Slice(file.path, file.format, file.compression) for file in listed_files(self._folder, number))
        before = len(config.validation_sets)
        split = VAL if number < before else None
        if config.chat is not None:
            chat = self._recipe(config.chat, slices)
            return Source(
                SetRules(rules, given.weight, split, chat), self._resolved[number][0].rows, given.max_documents
            )
        place = f"validation.{number}" if number < before else f"datasets.{number - before}"
        column = find_text_column(slices, given.text_column, str(self._folder.folder), f"{place}.text_column")
        text = dataclasses.replace(rules, text_column=column)
        return Source(SetRules(text, given.weight, split), self._resolved[number][0].rows, given.max_documents)

    @property
    def _preferred_field(self) -> PreferredField | None:
        rules = self._config.dedup_rules
        return None if rules is None or rules.near is None else rules.near.preferred_field

    def _find_value_field(self) -> ValueField | None:
        """The field by which near-duplicates stay, looked for in what is trained on: validation always stays."""
        preferred = self._preferred_field
        if preferred is None:
            return None
        numbers = range(len(self._config.validation_sets), len(self._config.sources))
        files = (file for number in numbers for file in listed_files(self._folder, number))
        slices = (Slice(file.path, file.format, file.compression) for file in files)
        from milldam.dedup.preferred import value_field

        setting = "dedup.near.prefer.field"
        path, values = head_values(slices, preferred.field, str(self._folder.folder), setting)
        return value_field(preferred.field, path, values, setting)

    def _recipe(self, rules: ChatRules, slices: Iterator[Slice]) -> ChatRecipe:
        from milldam.chat.masks import train_on
        from milldam.chat.reading import ChatRecipe, find_form

        return ChatRecipe(
            form=find_form(slices, rules.form, rules.columns, str(self._folder.folder)),
            template=self._template(rules),
            train_on=train_on(rules.train_on, turn_end=rules.turn_end),
            clean=self._config.clean_rules,
            dedup_on_prompt=rules.dedup_on == "prompt",
            group_by_prompt=rules.group_by == "prompt",
            max_tokens=rules.max_tokens,
            too_long=rules.too_long,
        )

    def _template(self, rules: ChatRules) -> TemplateSource:
        from milldam.chat.loading import find_template
        from milldam.chat.template import ChatTemplate

        found = find_template(
            self._config.tokenizer_rules.path,
            template=rules.template,
            name=rules.named_template,
            variables=rules.variables,
        )
        day = datetime.fromisoformat(rules.date) if rules.date is not None else datetime.now()
        found = dataclasses.replace(found, date=datetime(day.year, day.month, day.day))
        for text in filter(None, (found.text, found.tool_text)):
            ChatTemplate(text)  # what can't be read is found here
        return found

    def _read_tokenizer(self) -> TokenizerText:
        rules = self._config.tokenizer_rules
        if rules.train is not None and not Path(rules.path).exists():
            raise InputError(
                f"{rules.path}: no tokenizer there yet. Train it first, with the same file: milldam train-tokenizer"
            )
        return read_tokenizer(rules.path)

    def _with_tokenizer(
        self,
        text: TokenizerText,
        input_identity: dict[str, Any],
        shard_size: int,
        sources: tuple[Source, ...],
        value: ValueField | None,
    ) -> Prepared:
        rules = self._config.tokenizer_rules
        plain = rules.special_text == "plain"
        question = Question(text, rules.encoder, rules.bos, rules.eos, plain, self._samples(sources[-1]))
        known = find_out(question, user_cache() / KNOWN_TOKENIZERS)
        tokenizer_hash = hash_bytes(known.json.encode())
        preferred = self._preferred_field
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
            sources=tuple(_with_special_tokens(one, known.added) for one in sources),
            shard_size=shard_size,
            identity=Identity(settled | self._settings(sources, value), input_identity, text.name),
            left_out=str(self.left_out),
            preparation=self,
            evaluation=self._evaluation,
            index=self._index,
            value=value,
            preferred="" if preferred is None or value is None else preferred.described(value.kind),
        )

    def _settings(self, sources: tuple[Source, ...], value: ValueField | None) -> dict[str, Any]:
        """The configuration's settings, with what "auto" stands for settled, so that it is compared as what it is."""
        settings = self._config.settings()
        if self._config.chat is not None:
            settings["chat"] |= _chat_settings(sources)
        if value is not None:
            settings["dedup"]["near"]["prefer"]["kind"] = value.kind
        columns = [source.rules.text.text_column for source in sources]
        for one, column in zip(settings["validation"] + settings["datasets"], columns, strict=True):
            one["text_column"] = column
        for stage in ("clean", "filters"):
            function = (settings[stage] or {}).get("function")
            if function is not None:
                from milldam.text.user_functions import function_hash

                settings[stage]["function_hash"] = function_hash(function)
        return settings

    def _samples(self, source: Source) -> list[str]:
        """The first documents of a dataset, up to some tens of kilobytes."""
        if STDIN in self._config.sources[-1].paths:
            return []
        texts: list[str] = []
        size = 0
        lenient = dataclasses.replace(source.rules.text, strict=False, invalid_utf8="reject")
        number = len(self._config.sources) - 1
        for file in itertools.islice(listed_files(self._folder, number), _FILES_SAMPLED):
            if file.format in ("parquet", "arrow") and next(iter(slice_file(file, 1, lenient))).unpacking > WORK_BYTES:
                continue  # the budget is yet to be held against that
            # A batch of conversations is rendered whole: of what can be cut, no more is read than gives the samples.
            cut = source.rules.chat is not None and file.format == "jsonl" and file.compression is None
            head = Unit(0, (Slice(file.path, file.format, file.compression, stop=_CHAT_HEAD if cut else None),))
            rules = dataclasses.replace(source.rules, text=lenient)
            for documents in UnitReader(Reading(head, rules, None, spool=str(self._folder.folder))):
                for text in documents.texts:
                    texts.append(text.as_py()[:SAMPLE_BYTES])
                    size += len(texts[-1])
                    if size > SAMPLE_BYTES:
                        return texts
        return texts


def _with_special_tokens(source: Source, tokens: tuple[str, ...]) -> Source:
    """Of conversations: so that those which hold the text of one can be counted."""
    if source.rules.chat is None:
        return source
    chat = dataclasses.replace(source.rules.chat, special_tokens=tokens)
    return dataclasses.replace(source, rules=dataclasses.replace(source.rules, chat=chat))


def _chat_settings(sources: tuple[Source, ...]) -> dict[str, Any]:
    """What is found out of conversations and changes the result: the template by its content, the forms by name."""
    recipes = [source.rules.chat for source in sources if source.rules.chat is not None]
    kinds = {(one.sides, one.form.labelled) for one in recipes}
    if len(kinds) > 1:
        names = ", ".join(dict.fromkeys(str(one.form) for one in recipes))
        raise InputError(f"Datasets of pairs, with labels and without go into stores of their own; here are {names}.")
    template = recipes[0].template
    texts = [template.text] if template.tool_text is None else [template.text, template.tool_text]
    forms = [{"name": one.form.name, "columns": dict(one.form.columns), "label": one.form.labelled} for one in recipes]
    return {
        "form": forms,
        "template": hash_bytes("\0".join(texts).encode()),
        "variables": template.variables,
        "date": template.date.date().isoformat() if template.date is not None and template.writes_date else None,
    }


def wanted_rows(source: Source, total: int) -> tuple[int, int]:
    """(first, behind the last) of a dataset's documents that are wanted, when it has `total`."""
    first, stop = source.rows.bounds(total) if source.rows is not None else (0, total)
    return first, stop if source.max_documents is None else min(stop, first + source.max_documents)


def listed_files(folder: RunFolder, dataset: int) -> Iterator[InputFile]:
    """The files of one dataset, as just listed."""
    return (InputFile(**file) for file in folder.inputs.listed(dataset))


def planned_units(folder: RunFolder, sources: tuple[Source, ...], shard_size: int) -> Iterator[Unit]:
    """Every unit in plan order: dataset after dataset, each repetition on its own."""
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
