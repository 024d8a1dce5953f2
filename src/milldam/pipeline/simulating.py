"""A job's input as a listing has it, for a plan alone: nothing of it is opened, and nothing of it is held.

What documents are like is learned from sample files, where there are any. Two passes over the listing, about 15 us a
file: one for the totals, which the size of units follows from, one for the units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from milldam.config.settings import Config
from milldam.errors import InputError
from milldam.pipeline.estimating import Survey
from milldam.pipeline.preparing import Preparation, Prepared, cut_units
from milldam.run.folder import Run
from milldam.sources.data_sets import Resolved
from milldam.sources.listed import Listing, belongs, slice_listed
from milldam.sources.listing import InputFile, list_inputs
from milldam.sources.reading import slice_file
from milldam.sources.splits import parse_split
from milldam.sources.units import SAMPLED_SHARD, Unit, plan_units


class SimulatedPreparation(Preparation):
    """As if the data sets of the configuration held the files of a listing.

    With one data set, all of them are its; else those that its paths name, or lead to.
    """

    def __init__(self, config: Config, run: Run, listing: Listing) -> None:
        self._listing = listing
        self.documents: Counter[int] = Counter()
        """By data set, where the listing tells them."""
        self.files = 0
        super().__init__(config, run)

    def list_input(self) -> dict[str, Any]:
        size = counted = 0
        sources = self._config.sources
        for number in range(len(sources)):
            for file, documents in self._files_of(number):
                self.files, size, counted = self.files + 1, size + file.size, counted + (documents is not None)
                self.documents[number] += documents or 0
        if not self.files:
            raise InputError(f"{self._listing.path}: it lists no file of a data set of the configuration.")
        if counted < self.files:
            self.documents.clear()
        return {"files": self.files, "bytes": size, "fingerprint": "simulated"}

    def told(self) -> tuple[str, ...]:
        """What is supposed, in words."""
        sample = ", ".join(self._listing.sample)
        return (
            f"input: {self.files:,} files by {self._listing.path}; none of them was opened",
            f"documents: {'by the listing' if self.documents else 'by the sample' if sample else 'as in typical text'}",
            f"text, tokens and speed: {'measured on ' + sample if sample else 'typical English text, typical speed'}",
            "disk: texts are not kept between the passes",
        )

    def units(self, prepared: Prepared) -> Iterator[Unit]:
        def files(number: int) -> Iterator[InputFile]:
            return (file for file, _ in self._files_of(number))

        return cut_units(files, slice_listed, prepared.sources, prepared.shard_size)

    def sample(self, prepared: Prepared, some: list[Unit]) -> list[Unit]:
        """Some of the sample files, by the rules of the last data set."""
        last = len(prepared.sources) - 1
        rules = prepared.sources[last].rules.text
        files = self._heads(last)
        units = plan_units(files, SAMPLED_SHARD, lambda file, size: slice_file(file, size, rules), dataset=last)
        return Survey.of(units).some

    def _files_of(self, number: int) -> Iterator[tuple[InputFile, int | None]]:
        one = self._config.sources[number]
        every = len(self._config.sources) == 1
        listed = self._listing.files(one.input_format)
        return (found for found in listed if every or belongs(found[0].path, one.paths))

    def _heads(self, number: int) -> Iterator[InputFile]:
        return list_inputs(self._listing.sample, self._config.sources[number].input_format)

    def _resolve_all(self) -> list[list[Resolved]]:
        """Without a look at what is there."""
        given = [one.split for one in self._config.sources]
        rows = [parse_split(split).rows if split is not None else None for split in given]
        return [[Resolved((), rows=one)] for one in rows]
