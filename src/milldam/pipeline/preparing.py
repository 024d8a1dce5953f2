"""Everything a job has to know before it works: input, tokenizer, columns. What can be wrong is found here.

Reads the heads of a few files and nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milldam.config.settings import VAL, Config
from milldam.errors import InputError
from milldam.files import hash_bytes, user_cache
from milldam.input_files import LeftOut
from milldam.memory import parse_size, release
from milldam.pipeline.documents import SetRules, read_documents
from milldam.pipeline.judging import preload_rules
from milldam.run.folder import RunFolder
from milldam.run.pools import TOKENIZER_FACTOR, WORK_BYTES
from milldam.run.units import Identity
from milldam.sources.batch import TextRules
from milldam.sources.columns import find_text_column, head_values
from milldam.sources.compression import STDIN
from milldam.sources.data_sets import resolve_data_set
from milldam.sources.reading import slice_file
from milldam.sources.units import CHAT_SHARD_SIZE, SHARD_SIZE, InputFile, Slice, Unit, list_inputs, plan_units
from milldam.tokenizers.loading import read_tokenizer
from milldam.tokenizers.proof import KNOWN_TOKENIZERS, Choice, KnownTokenizer, Question, find_out, settle_encoder

if TYPE_CHECKING:
    from milldam.chat.reading import ChatRecipe
    from milldam.dedup.preferred import ValueField
    from milldam.pipeline.evaluation_sets import Evaluation
    from milldam.pipeline.index_lookup import IndexLookup
    from milldam.rules import ChatRules

SAMPLE_BYTES = 64 << 10
_CHAT_HEAD = 2 * SAMPLE_BYTES
_FILES_SAMPLED = 3


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset, looked up."""

    rules: SetRules
    rows: Any
    """The slice of its documents that is wanted; None: all."""
    max_documents: int | None

    @property
    def counted(self) -> bool:
        """Its documents must be counted before it can be said which of them are wanted."""
        return self.rows is not None or self.max_documents is not None


def wanted_rows(source: Source, total: int) -> tuple[int, int]:
    """(first, behind the last) of a dataset's documents that are wanted, when it has `total`."""
    first, stop = source.rows.bounds(total) if source.rows is not None else (0, total)
    return first, stop if source.max_documents is None else min(stop, first + source.max_documents)


class Input:
    """The datasets of a configuration, listed into a run folder."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self.config, self._folder = config, folder
        self._resolved = [
            [resolve_data_set(path, one.split, one.subset, input_format=one.input_format) for path in one.paths]
            for one in config.sources
        ]
        self.left_out = LeftOut()
        """Files of the input's folders that are not read."""
        self.evaluation: Evaluation | None = None
        if config.evaluation_sets:
            from milldam.pipeline.evaluation_sets import Evaluation

            self.evaluation = Evaluation(config.evaluation_sets, str(folder.folder))
        self.index: IndexLookup | None = None
        if config.index_rules is not None:
            from milldam.pipeline.index_lookup import IndexLookup

            self.index = IndexLookup(config, config.index_rules)

    def look(self) -> dict[str, Any]:
        """List the input as it is now; its number, size and fingerprint."""
        self.left_out = LeftOut()
        state = self._folder.inputs.write(self._found())
        if self.index is not None:
            return self.index.with_state(state)
        return state if self.evaluation is None else state | {"evaluation": self.evaluation.digest}

    def _found(self) -> Iterator[tuple[int, InputFile]]:
        if self._folder.task is not None:
            # As it was when the run was prepared: not every task need ask for every file. Who finishes does.
            yield from ((entry.pop("dataset", 0), InputFile(**entry)) for entry in self._folder.inputs.planned())
            return
        for number, resolved in enumerate(self._resolved):
            for one in resolved:
                yield from ((number, file) for file in list_inputs(one.inputs, one.input_format, self.left_out))

    def files(self, dataset: int) -> Iterator[InputFile]:
        """The files of one dataset, as just listed."""
        return (InputFile(**file) for file in self._folder.inputs.listed(dataset))

    def slices(self, *datasets: int) -> Iterator[Slice]:
        files = (file for dataset in datasets for file in self.files(dataset))
        return (Slice(file.path, file.format, file.compression) for file in files)

    def sources(self) -> tuple[Source, ...]:
        """Every dataset, with what was found of it; the input must be listed."""
        return tuple(map(self._source, range(len(self.config.sources))))

    def _source(self, number: int) -> Source:
        config, given, spool = self.config, self.config.sources[number], str(self._folder.folder)
        rules = TextRules(
            given.documents,
            given.separator,
            given.text_column,
            config.invalid_utf8,
            config.strict,
            only_file=len(list(itertools.islice(self.files(number), 2))) == 1,
            max_document_bytes=parse_size(config.max_document_bytes),
        )
        before, chat = len(config.validation_sets), None
        if config.chat is not None:
            chat = _recipe(config, config.chat, self.slices(number), spool)
        else:
            place = f"validation.{number}" if number < before else f"datasets.{number - before}"
            column = find_text_column(self.slices(number), given.text_column, spool, f"{place}.text_column")
            rules = replace(rules, text_column=column)
        set_rules = SetRules(rules, given.weight, VAL if number < before else None, chat)
        return Source(set_rules, self._resolved[number][0].rows, given.max_documents)

    def value_field(self) -> ValueField | None:
        """The field by which near-duplicates stay, looked for in what is trained on: validation always stays."""
        rules, setting = self.config.dedup_rules, "dedup.near.prefer.field"
        preferred = None if rules is None or rules.near is None else rules.near.preferred_field
        if preferred is None:
            return None
        from milldam.dedup.preferred import value_field

        trained = range(len(self.config.validation_sets), len(self.config.sources))
        path, values = head_values(self.slices(*trained), preferred.field, str(self._folder.folder), setting)
        return value_field(preferred.field, path, values, setting)

    def units(self, sources: tuple[Source, ...], shard_size: int) -> Iterator[Unit]:
        """Every unit in plan order: dataset after dataset, each repetition on its own."""
        index = 0
        for number, source in enumerate(sources):
            slicer, first = partial(slice_file, rules=source.rules.text), index
            for copy in range(math.ceil(source.rules.weight)):
                behind, files = index - first, self.files(number)
                for unit in plan_units(files, shard_size, slicer, first_index=index, dataset=number, copy=copy):
                    yield replace(unit, original=unit.index - behind) if copy else unit
                    index += 1

    def samples(self, source: Source) -> list[str]:
        """The first documents of the last dataset, up to some tens of kilobytes."""
        if STDIN in self.config.sources[-1].paths:
            return []
        texts: list[str] = []
        lenient = replace(source.rules.text, strict=False, invalid_utf8="reject")
        chat = source.rules.chat is not None
        for file in itertools.islice(self.files(len(self.config.sources) - 1), _FILES_SAMPLED):
            if file.format in ("parquet", "arrow") and next(iter(slice_file(file, 1, lenient))).unpacking > WORK_BYTES:
                continue  # the budget is yet to be held against that
            # A batch of conversations is rendered whole: of what can be cut, no more is read than gives the samples.
            stop = _CHAT_HEAD if chat and file.format == "jsonl" and file.compression is None else None
            head = Unit(0, (Slice(file.path, file.format, file.compression, stop=stop),))
            rules = replace(source.rules, text=lenient)
            for batch in read_documents(head, rules, spool=str(self._folder.folder)):
                for text in batch.texts:
                    texts.append(text.as_py()[:SAMPLE_BYTES])
                    if sum(map(len, texts)) > SAMPLE_BYTES:
                        return texts
        return texts


def _recipe(config: Config, rules: ChatRules, slices: Iterator[Slice], spool: str) -> ChatRecipe:
    """How conversations become texts."""
    from milldam.chat.loading import find_template
    from milldam.chat.masks import train_on
    from milldam.chat.reading import ChatRecipe, find_form
    from milldam.chat.template import ChatTemplate

    path, named = config.tokenizer_rules.path, rules.named_template
    template = find_template(path, template=rules.template, name=named, variables=rules.variables)
    day = datetime.fromisoformat(rules.date) if rules.date is not None else datetime.now()
    template = replace(template, date=datetime(day.year, day.month, day.day))
    for text in filter(None, (template.text, template.tool_text)):
        ChatTemplate(text)  # what can't be read is found here
    return ChatRecipe(
        form=find_form(slices, rules.form, rules.columns, spool),
        template=template,
        train_on=train_on(rules.train_on, turn_end=rules.turn_end),
        clean=config.clean_rules,
        dedup_on_prompt=rules.dedup_on == "prompt",
        group_by_prompt=rules.group_by == "prompt",
        max_tokens=rules.max_tokens,
        too_long=rules.too_long,
        per_turn=rules.per_turn,
    )


# ---- all of it ----


@dataclass(frozen=True, slots=True)
class Prepared:
    input: Input
    sources: tuple[Source, ...]
    identity: Identity
    shard_size: int
    tokenizer_name: str
    tokenizer_hash: str
    question: Question
    known: KnownTokenizer
    value: ValueField | None
    """The field by which near-duplicates stay."""

    @property
    def vocab_size(self) -> int:
        return self.known.vocab_size

    @property
    def tokenizer_bytes(self) -> int:
        """What it will take in memory, as measured of many."""
        return TOKENIZER_FACTOR * len(self.known.json)

    @property
    def evaluation(self) -> Evaluation | None:
        """The evaluation sets that are kept out."""
        return self.input.evaluation

    @property
    def index(self) -> IndexLookup | None:
        """The index whose documents are dropped in one pass."""
        return self.input.index

    @property
    def left_out(self) -> str:
        """Files of the input's folders that are not read, and why."""
        return str(self.input.left_out)

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
    def preferred(self) -> str:
        """Which of near-duplicates stays, where a field decides."""
        rules = self.input.config.dedup_rules
        if self.value is None or rules is None or rules.near is None or rules.near.preferred_field is None:
            return ""
        return rules.near.preferred_field.described(self.value.kind)

    @property
    def conversations(self) -> str:
        """The forms of conversations, and how they become texts; empty: there are none."""
        recipes = [one.chat for one in self.sets if one.chat is not None]
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

    def units(self) -> Iterator[Unit]:
        """Every unit in plan order."""
        return self.input.units(self.sources, self.shard_size)

    def input_changed(self) -> bool:
        """Whether the input is another one now."""
        return self.input.look() != self.identity.input


def prepare(config: Config, folder: RunFolder) -> Prepared:
    """Look up what the configuration names; the input is listed in the run folder."""
    input, rules = Input(config, folder), config.tokenizer_rules
    # What rules name must be there: functions, the language model.
    preload_rules(config.filters, config.clean_rules)
    if config.filters.language is not None:
        from milldam.filters.language import unload_model

        unload_model()
    listed = input.look()
    sources, value = input.sources(), input.value_field()
    if rules.train is not None and not Path(rules.path).exists():
        raise InputError(
            f"{rules.path}: no tokenizer there yet. Train it first, with the same file: milldam train-tokenizer"
        )
    text, plain = read_tokenizer(rules.path), rules.special_text == "plain"
    question = Question(text, rules.encoder, rules.bos, rules.eos, plain, input.samples(sources[-1]))
    known = find_out(question, user_cache() / KNOWN_TOKENIZERS)
    # So that conversations which hold the text of a special token can be counted.
    sources = tuple(
        one if (chat := one.rules.chat) is None
        else replace(one, rules=replace(one.rules, chat=replace(chat, special_tokens=known.added)))
        for one in sources
    )  # fmt: skip
    tokenizer_hash = hash_bytes(known.json.encode())
    shard_size = config.shard_bytes or (SHARD_SIZE if config.chat is None else CHAT_SHARD_SIZE)
    special = {"bos": known.special.bos_token, "eos": known.special.eos_token}
    settings = {"tokenizer": tokenizer_hash, **special, "shard_size": shard_size} | _settled(config, sources, value)
    identity = Identity(settings, listed, text.name)
    # The loaded tokenizer was needed for this alone: it must not stay in memory.
    release()
    return Prepared(input, sources, identity, shard_size, text.name, tokenizer_hash, question, known, value)


def _settled(config: Config, sources: tuple[Source, ...], value: ValueField | None) -> dict[str, Any]:
    """The configuration's settings, with what "auto" stands for settled, so that it is compared as what it is."""
    settings = config.settings()
    if config.chat is not None:
        settings["chat"] |= _chat_settings(sources)
    if value is not None:
        settings["dedup"]["near"]["prefer"]["kind"] = value.kind
    for one, source in zip(settings["validation"] + settings["datasets"], sources, strict=True):
        one["text_column"] = source.rules.text.text_column
    for stage in ("clean", "filters"):
        function = (settings[stage] or {}).get("function")
        if function is not None:
            from milldam.text.user_functions import function_hash

            settings[stage]["function_hash"] = function_hash(function)
    return settings


def _chat_settings(sources: tuple[Source, ...]) -> dict[str, Any]:
    """What is found out of conversations and changes the result: the template by its content, the forms by name."""
    recipes = [source.rules.chat for source in sources if source.rules.chat is not None]
    if len({(one.sides, one.form.labelled) for one in recipes}) > 1:
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
