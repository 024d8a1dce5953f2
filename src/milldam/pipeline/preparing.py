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
from milldam.files import hash_bytes
from milldam.memory import parse_size, release
from milldam.pipeline.documents import SetRules, read_documents
from milldam.pipeline.judging import preload_rules
from milldam.run.budget import WORK_BYTES
from milldam.run.folder import RunFolder
from milldam.run.units import Identity
from milldam.sources.batch import TextRules
from milldam.sources.columns import find_text_column, head_values
from milldam.sources.compression import STDIN
from milldam.sources.data_sets import resolve_data_set
from milldam.sources.reading import TABLES, slice_file
from milldam.sources.units import CHAT_SHARD_SIZE, SHARD_SIZE, InputFile, Slice, Unit, list_inputs, plan_units
from milldam.tokenizers.loading import read_tokenizer
from milldam.tokenizers.proof import ProvedTokenizer, prove

if TYPE_CHECKING:
    from milldam.chat.reading import ChatRecipe
    from milldam.dedup.preferred import ValueField
    from milldam.pipeline.decontaminating import Evaluation
    from milldam.rules import ChatRules

SAMPLE_BYTES = 64 << 10
_CHAT_HEAD = 2 * SAMPLE_BYTES
_FILES_SAMPLED = 3


class Input:
    """The datasets of a configuration, listed into a run folder."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config, self._folder = config, folder
        self._resolved = [
            [resolve_data_set(path, one.split, one.subset, input_format=one.input_format) for path in one.paths]
            for one in config.sources
        ]
        self.left_out = Counter[str]()
        """Files of the input's folders that are not read."""
        self.evaluation: Evaluation | None = None
        """The evaluation sets that are kept out."""
        if config.decontaminate:
            from milldam.pipeline.decontaminating import Evaluation

            self.evaluation = Evaluation(config.decontaminate)

    def look(self) -> dict[str, Any]:
        """List the input as it is now; its number, size and fingerprint."""
        self.left_out = Counter[str]()

        def files() -> Iterator[tuple[int, InputFile]]:
            for number, resolved in enumerate(self._resolved):
                for one in resolved:
                    yield from ((number, file) for file in list_inputs(one.inputs, one.input_format, self.left_out))

        # A task of a job array takes it as it was when the run was prepared: not every task need ask for every file.
        # The one that finishes does.
        planned = ((entry.pop("dataset", 0), InputFile(**entry)) for entry in self._folder.inputs.planned())
        state = self._folder.inputs.write(files() if self._folder.task is None else planned)
        if self._config.index_rules is not None:
            from milldam.pipeline.index_lookup import with_index_state

            return with_index_state(state, self._config, self._config.index_rules)
        return state if self.evaluation is None else state | {"evaluation": self.evaluation.digest}

    def _files(self, *datasets: int) -> Iterator[InputFile]:
        return (InputFile(**file) for dataset in datasets for file in self._folder.inputs.listed(dataset))

    def _slices(self, *datasets: int) -> Iterator[Slice]:
        return (Slice(file.path, file.format, file.compression) for file in self._files(*datasets))

    def sets(self) -> tuple[SetRules, ...]:
        """Every dataset, with what its files show; the input must be listed."""
        config, before = self._config, len(self._config.validation)
        sets = []
        for number, one in enumerate(config.sources):
            rules = TextRules(
                one.documents,
                one.separator,
                one.text_column,
                config.invalid_utf8,
                config.strict,
                only_file=len(list(itertools.islice(self._slices(number), 2))) == 1,
                max_document_bytes=parse_size(config.max_document_bytes),
            )
            chat = None
            if config.chat is not None:
                chat = _recipe(config, config.chat, self._slices(number))
            else:
                place = f"validation.{number}" if number < before else f"datasets.{number - before}"
                column = find_text_column(self._slices(number), one.text_column, f"{place}.text_column")
                rules = replace(rules, text_column=column)
            split, rows = VAL if number < before else None, self._resolved[number][0].rows
            sets.append(SetRules(rules, one.weight, split, chat, rows, one.max_documents))
        return tuple(sets)

    def value_field(self) -> ValueField | None:
        """The field by which near-duplicates stay, looked for in what is trained on: validation always stays."""
        rules, setting = self._config.dedup_rules, "dedup.near.prefer.field"
        preferred = None if rules is None or rules.near is None else rules.near.preferred_field
        if preferred is None:
            return None
        from milldam.dedup.preferred import value_field

        trained = range(len(self._config.validation), len(self._config.sources))
        path, values = head_values(self._slices(*trained), preferred.field, setting)
        return value_field(preferred.field, path, values, setting)

    def units(self, sets: tuple[SetRules, ...], shard_size: int) -> Iterator[Unit]:
        """Every unit in plan order: dataset after dataset, each repetition on its own."""
        index = 0
        for number, rules in enumerate(sets):
            slicer, first = partial(slice_file, rules=rules.text), index
            for copy in range(math.ceil(rules.weight)):
                behind = index - first
                for unit in plan_units(
                    self._files(number), shard_size, slicer, first_index=index, dataset=number, copy=copy
                ):
                    yield replace(unit, original=unit.index - behind) if copy else unit
                    index += 1

    def samples(self, rules: SetRules) -> list[str]:
        """The first documents of the last dataset, up to some tens of kilobytes."""
        if STDIN in self._config.sources[-1].paths:
            return []
        texts, size = list[str](), 0
        rules = replace(rules, text=replace(rules.text, strict=False, invalid_utf8="reject"))
        for file in itertools.islice(self._files(len(self._config.sources) - 1), _FILES_SAMPLED):
            if file.format in TABLES and next(iter(slice_file(file, 1, rules.text))).unpacking > WORK_BYTES:
                continue  # the budget is yet to be held against that
            # A batch of conversations is rendered whole: of what can be cut, no more is read than gives the samples.
            cut = rules.chat is not None and file.format == "jsonl" and file.compression is None
            slice = Slice(file.path, file.format, file.compression, stop=_CHAT_HEAD if cut else None)
            for batch in read_documents(Unit(0, (slice,)), rules):
                for text in batch.texts:
                    texts.append(text.as_py()[:SAMPLE_BYTES])
                    size += len(texts[-1])
                    if size > SAMPLE_BYTES:
                        return texts
        return texts


def _recipe(config: Config, rules: ChatRules, slices: Iterator[Slice]) -> ChatRecipe:
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
        form=find_form(slices, rules.form, rules.columns),
        template=template,
        train_on=train_on(rules.train_on),
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
    sets: tuple[SetRules, ...]
    identity: Identity
    shard_size: int
    known: ProvedTokenizer
    value: ValueField | None
    """The field by which near-duplicates stay."""

    @property
    def index_key(self) -> int:
        """A number, for the keys of units, of the index that they are compared with; 0: there is none."""
        return int(self.identity.input.get("index", "0")[:16], 16)

    def preferred(self, config: Config) -> str:
        """Which of near-duplicates stays, where a field decides."""
        near = None if config.dedup_rules is None else config.dedup_rules.near
        if self.value is None or near is None or near.preferred_field is None:
            return ""
        return near.preferred_field.described(self.value.kind)

    def chat_facts(self, counts: Counter[str]) -> dict[str, Any] | None:
        """Facts of a store's conversations; None: it has none."""
        recipe = self.sets[-1].chat
        if recipe is None:
            return None
        known = dict.fromkeys(("conversations", "turns", "trained_tokens"), 0)
        return {"form": recipe.form.name, "pairs": recipe.sides == 2} | known | dict(counts)


def prepare(config: Config, folder: RunFolder) -> Prepared:
    """Look up what the configuration names; the input is listed in the run folder."""
    input, rules = Input(config, folder), config.tokenizer_rules
    # What rules name must be there: functions, the language model.
    preload_rules(config.filters, config.clean_rules)
    if config.filters.language is not None:
        from milldam.filters.language import unload_model

        unload_model()
    listed = input.look()
    sets, value = input.sets(), input.value_field()
    if rules.train is not None and not Path(rules.path).exists():
        raise InputError(
            f"{rules.path}: no tokenizer there yet. Train it first, with the same file: milldam train-tokenizer"
        )
    text, plain = read_tokenizer(rules.path), rules.special_text == "plain"
    samples = input.samples(sets[-1])
    known = prove(text, encoder=rules.encoder, bos=rules.bos, eos=rules.eos, plain_specials=plain, samples=samples)
    if config.chat is not None:  # so that conversations which hold the text of a special token can be counted
        sets = tuple(one.with_special_tokens(known.added) for one in sets)
    shard_size = config.shard_bytes or (SHARD_SIZE if config.chat is None else CHAT_SHARD_SIZE)
    special = {"bos": known.special.bos_token, "eos": known.special.eos_token}
    settings = {"tokenizer": hash_bytes(known.json.encode()), **special, "shard_size": shard_size}
    identity = Identity(settings | _settled(config, sets, value), listed, text.name)
    # The loaded tokenizer was needed for this alone: it must not stay in memory.
    release()
    return Prepared(input, sets, identity, shard_size, known, value)


def _settled(config: Config, sets: tuple[SetRules, ...], value: ValueField | None) -> dict[str, Any]:
    """The configuration's settings, with what "auto" stands for settled, so that it is compared as what it is."""
    settings = config.settings()
    if config.chat is not None:
        settings["chat"] |= _chat_settings([one.chat for one in sets if one.chat is not None])
    if value is not None:
        settings["dedup"]["near"]["prefer"]["kind"] = value.kind
    for one, rules in zip(settings["validation"] + settings["datasets"], sets, strict=True):
        one["text_column"] = rules.text.text_column
    for stage in ("clean", "filters"):
        function = (settings[stage] or {}).get("function")
        if function is not None:
            from milldam.text.user_functions import function_hash

            settings[stage]["function_hash"] = function_hash(function)
    return settings


def _chat_settings(recipes: list[ChatRecipe]) -> dict[str, Any]:
    """The settings of conversations that were looked up: the template by its content, the forms by name."""
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
