"""Settings: what a file, `--set` and options may say, and where mistakes are reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import yaml
from annotated_types import MinLen
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import PROJECT

from milldam.cli import main
from milldam.config.checking import MOST_PROBLEMS, Values, blocks_of, checked_settings
from milldam.config.loading import load_config, read_config, read_file
from milldam.config.settings import Config, DataSet
from milldam.errors import ConfigError, Setting
from milldam.rules import (
    AtLeastOne,
    CleanRules,
    DedupRules,
    FilterRules,
    NearRules,
    PackingRules,
    Settings,
    SizeRange,
    Texts,
)

BASE = "datasets: a.jsonl\ntokenizer: gpt2/\nout: o\n"
EXAMPLES = sorted((PROJECT / "examples").glob("*.yaml"))
Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Loads a text as config.yaml, with overrides."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, *overrides: str) -> Config:
        Path("config.yaml").write_text(text, encoding="utf-8")
        return load_config("config.yaml", overrides)

    return load_text


@pytest.fixture
def complaint(load: Load) -> Callable[..., str]:
    """The error that a text raises."""

    def complain(text: str, *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load(text, *overrides)
        return str(caught.value)

    return complain


# ---- options and arguments ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Brewing(Settings):
    """Settings of a job that does not exist."""

    out: str
    leaves: Texts = ()
    kind: Literal["green", "black"] = "green"
    cups: AtLeastOne | None = None
    pot: Annotated[str | int, SizeRange(1000, 10**6)] = "2KB"
    name: Annotated[str, MinLen(1)] = "tea"
    hot: bool = True

    def __post_init__(self) -> None:
        if self.cups == 7:
            raise ConfigError(Setting("cups"), ": 7 are too many for ", Setting("kind", self.kind), ".")


def spelled(error: ConfigError) -> str:
    return error.spelled(lambda setting: f"<{setting.path}>")


def test_options_are_read_as_they_are_meant() -> None:
    """None is the default, one item a list of one, a path text, `off` false where a truth value is wanted."""
    made = checked_settings(Brewing, {"out": Path("a"), "cups": None, "kind": None, "leaves": "assam", "hot": "off"})
    assert made == Brewing(out="a", leaves=("assam",), hot=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cups": 0}, "<cups>: must be at least 1."),
        ({"cups": 7}, "<cups>: 7 are too many for <kind>."),
        ({"kind": "blak"}, '<kind>: must be green or black, not "blak". Did you mean "black"?'),
        ({"pot": "10B"}, "<pot>: must be at least 1 KB."),
        ({"pot": "much"}, '<pot>: "much" is not a size. Write it as 512MB, 2GB or 1.5GiB.'),
        ({"name": ""}, "<name>: is empty."),
        ({"leaves": ["a", 1.5, {}]}, "<leaves.2>: must be a text, not a block of keys."),
        ({"cupps": 1}, '<cupps>: no such key. Did you mean "cups"?'),
        ({"out": None}, "<out> is missing."),
        ({"cups": 0, "name": ""}, "<cups>: must be at least 1.\n<name>: is empty."),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    """By its setting, which the command line spells `--cups` and the library `cups`."""
    with pytest.raises(ConfigError) as caught:
        checked_settings(Brewing, {"out": "a"} | options)
    assert spelled(caught.value) == message


def test_options_replace_values_of_a_file(tmp_path: Path) -> None:
    """A wrong option is reported as an option, a wrong key with its line, a missing one with advice."""
    file = tmp_path / "tea.yaml"
    file.write_text("out: a\ncups: 0\n")

    def brew(options: dict[str, Any]) -> Brewing:
        values = read_file(file, "tea.yaml")
        for name, value in options.items():
            values.put(name, value)
        return checked_settings(Brewing, values)

    assert brew({"cups": 2}).cups == 2
    for options, message in (
        ({}, "tea.yaml:2: cups: must be at least 1."),
        ({"cups": -1}, "<cups>: must be at least 1."),
        ({"cups": 7}, "<cups>: 7 are too many for <kind>."),
        ({"cups": 3, "pot": 1}, "<pot>: must be at least 1 KB."),
    ):
        with pytest.raises(ConfigError) as caught:
            brew(options)
        assert spelled(caught.value) == message
    with pytest.raises(ConfigError) as caught:
        checked_settings(Brewing, Values(if_missing="Say where."))
    assert spelled(caught.value) == "<out> is missing. Say where."


# ---- a file ----


OFF = DedupRules(method="off")
UNSHOWN = ("words", "__pydantic_config__")


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("", "limit", None),
        ("limit: 1e6", "limit", 1_000_000),
        ("limit: 010", "limit", 10),
        ("splits: {val: 1e-3}", "splits", {"val": 0.001}),
        ("splits: {on: .5}", "splits", {"on": 0.5}),
        ("memory: 1_000_000_000", "memory", 10**9),
        ("strict: yes", "strict", True),
        ("clean: off", "clean", "off"),
        ("dedup: off", "dedup", OFF),
        ("dedup: near", "dedup", DedupRules(near=NearRules())),
        ("dedup: {method: off, near: {}}", "dedup", DedupRules(method="off", near=NearRules())),
        ("packing: none", "packing", "none"),
        ("packing: best_fit\nseq_len: 8", "packing", PackingRules(strategy="best_fit")),
        ("filters:\n  # all of them are comments", "filters", FilterRules()),
    ],
)
def test_values_are_read_as_they_are_meant(load: Load, line: str, key: str, value: Any) -> None:
    """Numbers of all spellings, words that YAML 1.1 takes for booleans, and words that stand for blocks."""
    assert getattr(load(BASE + line), key) == value


def test_anchors_and_merge_keys_work(load: Load) -> None:
    """What YAML offers against repetition is understood; a block's own keys win."""
    text = "datasets:\n- &first {path: a, text_column: t}\n- <<: *first\n  path: b\ntokenizer: x\nout: o"
    first, second = load(text).sources
    assert (first.paths, second.paths, second.text_column) == (("a",), ("b",), "t")


def test_a_dict_may_say_what_a_file_may() -> None:
    """Paths and tuples are understood; mistakes are reported by their keys."""
    keys = {"datasets": ({"path": Path("a")}, "b"), "tokenizer": Path("t"), "out": "o", "dedup": "off", "limit": None}
    config = load_config(keys, ["seed=3"])
    assert [one.paths for one in config.sources] == [("a",), ("b",)]
    assert (config.tokenizer.path, config.dedup, config.limit, config.seed) == ("t", OFF, None, 3)
    with pytest.raises(ConfigError, match=r'^config: dedup\.normalise: no such key\. Did you mean "normalize"\?$'):
        load_config(keys | {"dedup": {"normalise": True}})
    assert load_config({"hub_tokenizer_id": "t", "datasets": "d"}).out == "prepared"


@given(st.text(max_size=60))
def test_any_text_loads_or_is_a_config_error(tmp_path: Path, text: str) -> None:
    """Nothing else escapes, whatever the file holds."""
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError):
        load_config(path)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dedup:\n  normalise: yes", 'config.yaml:5: dedup.normalise: no such key. Did you mean "normalize"?'),
        ("dedup:\n  treshold: 1", 'config.yaml:5: dedup.treshold: no such key. Did you mean "threshold" under dedup.n'),
        ("num_workers: 2", 'config.yaml:4: num_workers: no such key. Did you mean "workers"?'),
        ("dedup: exct", 'config.yaml:4: dedup: must be off, exact, near, bloom or a block of keys, not "exct". Did'),
        ("seed: 1.5", "config.yaml:4: seed: must be a whole number, not 1.5."),
        ("seed: on", "config.yaml:4: seed: must be a whole number, not \"on\"."),
        ("strict: maybe", 'config.yaml:4: strict: must be true or false, not "maybe".'),
        ("splits: {val: .nan}", 'config.yaml:4: splits.val: must be a number, not ".nan".'),
        ("validation:\n- path: a\n-", "config.yaml:6: validation.1: must be a text or a block of keys, not empty."),
        ("validation:\n  split: a", "config.yaml:4: validation: the key path is missing."),
        ("dedup: null", "config.yaml:4: dedup: must be off, exact, near, bloom or a block of keys, not empty."),
        ("clean:\n  strip: on\n  strip: off", "config.yaml:6: strip: given twice."),
        ("seed: !!python/name:os.system 1", "config.yaml:4: not valid YAML: could not determine a constructor"),
        ("filters:\n  c4: {max_word_length: 0}", "config.yaml:5: filters.c4.max_word_length: must be more than 0."),
        ("filters:\n  c4: maybe", 'config.yaml:5: filters.c4: must be true or false or a block of keys, not "maybe".'),
        ("limit: 0", "config.yaml:4: limit: must be at least 1."),
        ("validation: {path: x, weight: 0}", "config.yaml:4: validation.weight: must be at least 1e-09."),
        ("packing: wrapped", "config.yaml:4: packing: needs seq_len"),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_its_place(complaint: Callable[..., str], text: str, message: str) -> None:
    """File, line, key, what is wrong, and the nearest right word, or the one for what other tools call so."""
    found = complaint(BASE + text)
    assert found.startswith(message) and "\n" not in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "config.yaml: empty. A configuration needs at least:\n  datasets: corpus.jsonl\n"),
        ("- a", "config.yaml: keys are wanted."),
        ("out: a: b", "config.yaml:1: not valid YAML: mapping values are not allowed here."),
        ("datasets: *.jsonl", "config.yaml:1: not valid YAML: while scanning an alias"),
        ("a: 1\n---\nb: 2", "config.yaml:2: not valid YAML: expected a single document"),
        ("a: 1\nb: \x07", "config.yaml: not valid YAML: unacceptable character #x0007"),
        ("[" * 900, "config.yaml: not valid YAML: maximum recursion depth exceeded"),
        ("a: &a [*a]", "config.yaml: too large or nested too deep for a configuration."),
        ("? [a]\n: 1", "config.yaml:1: a key must be a word."),
        ("seed: 1", "config.yaml: datasets, tokenizer and out are missing. A configuration needs at least:\n"),
        (  # aliases that multiply do not fill the memory
            "a0: &a0 [x]\n" + "".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]\n" for k in range(1, 9)),
            "config.yaml: too large or nested too deep for a configuration.",
        ),
        ("datasets: a\ntokenizer:\nout: o", "config.yaml:2: tokenizer: must be a text or a block of keys, not empty."),
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_refused(complaint: Callable[..., str], text: str, message: str) -> None:
    """In a few words, with the line where there is one."""
    assert complaint(text).startswith(message)


def test_several_mistakes_are_reported_at_once(complaint: Callable[..., str]) -> None:
    """One line each, in the order of the file; ten at most."""
    assert complaint(BASE + "sed: 1\nlimit: x").splitlines() == [
        'config.yaml:4: sed: no such key. Did you mean "seed"?',
        'config.yaml:5: limit: must be a whole number, not "x".',
    ]
    many = complaint(BASE + "".join(f"q{k}: 1\n" for k in range(MOST_PROBLEMS + 2))).splitlines()
    assert len(many) == MOST_PROBLEMS + 1
    assert many[-1] == "... and 2 more."


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    """Missing, a folder, not text, or the data itself given for the configuration."""
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: caf\xe9\n")
    (tmp_path / "data.jsonl").write_bytes(b"{}\n" * 400_000)
    for name, message in {
        "gone.yaml": "gone.yaml: no such file.",
        ".": "Is a directory",
        "latin.yaml": "latin.yaml: not UTF-8 text.",
        "data.jsonl": "too large for a configuration",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_config(tmp_path / name)


# ---- --set ----


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("seed=7", "seed", 7),
        ("splits.val=1e-3", "splits", {"val": 0.001}),
        ("datasets=*.jsonl", "datasets", (DataSet(path=("*.jsonl",)),)),
        ("datasets=[a, b]", "datasets", (DataSet(path=("a",)), DataSet(path=("b",)))),
        ("datasets.1=b", "datasets", (DataSet(path=("a.jsonl",)), DataSet(path=("b",)))),
        ("dedup.near.threshold=0.7", "dedup", DedupRules(near=NearRules(threshold=0.7))),
        ("dedup=off", "dedup", OFF),
        ("out=a=b", "out", "a=b"),
        ("out= spaced ", "out", "spaced"),
    ],
)
def test_overrides_win_over_the_file(load: Load, override: str, key: str, value: Any) -> None:
    """Values are YAML; blocks on the way are made."""
    assert getattr(load(BASE, override), key) == value


def test_overrides_reach_into_short_forms(load: Load) -> None:
    """A word that stands for a block is spelled out when a key of the block is set."""
    config = load(BASE + "dedup: bloom\npacking: best_fit", "tokenizer.bos=auto", "datasets.0.text_column=body",
                  "dedup.normalize=yes", "packing.buffer=5", "seq_len=8")  # fmt: skip
    assert (config.tokenizer_rules.path, config.tokenizer_rules.bos) == ("gpt2/", "auto")
    assert (config.sources[0].paths, config.sources[0].text_column) == (("a.jsonl",), "body")
    assert config.dedup == DedupRules(method="bloom", normalize=True)
    assert config.packing == PackingRules(strategy="best_fit", buffer=5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dedup.treshold=1", 'config.yaml: dedup.treshold: no such key. Did you mean "threshold" under dedup.near?'),
        ("limit=0", "config.yaml: limit: must be at least 1."),
        ("seed", "seed: write it as key=value"),
        ("a..b=1", "a..b=1: write it as key=value"),
        ("datasets=[", "datasets=[:1: not valid YAML"),
        ("out.x=1", "out.x=1: out is 'o', where x can't be set."),
        ("datasets.2.path=x", "datasets.2.path=x: datasets is ['a.jsonl'], where 2 can't be set."),
    ],
)
def test_a_wrong_override_is_reported_by_its_key(complaint: Callable[..., str], override: str, message: str) -> None:
    """The same errors, without a line of the file."""
    assert complaint(BASE, override).startswith(message)


# ---- files of Krill ----

# The two examples of seed 002, with what its "other config" has to hold.
BASIC = """\
preprocess_memory_efficient: true
preprocess_chunk_size: 1000
sequence_len: 2048
datasets:
  - path: large/dataset
    split: train
    text_column: text
"""
CACHED = """\
preprocess_memory_efficient: true
preprocess_chunk_size: 5000
preprocess_dedup_cache_dir: /tmp/dedup_cache
"""
REST = "hub_tokenizer_id: gpt2/\ndataset_prepared_path: ./artifacts/prepared\n"
NESTED = """\
datasets:
  - path: some/data
    split: train[:10_000]
tokenizer:
  hub_id: gpt2/
  vocab_size: 32000
preprocess:
  prepared_path: ./artifacts/prepared
  sequence_len: 1024
  min_length: 120
  chunk_size: 1000
  save_shard_size: 100MB
  dedup_cache_dir: ./cache
  memory_efficient: false
train:
  arch: qwen3
  learning_rate: 1e-3
"""
FLAT = """\
datasets:
  - path: some/data
    split: train[:10_000]
hub_tokenizer_id: gpt2/
vocab_size: 32000
dataset_prepared_path: ./artifacts/prepared
sequence_len: 1024
dataset_prepared_min_length: 120
preprocess_chunk_size: 1000
preprocess_save_shard_size: 100MB
preprocess_dedup_cache_dir: ./cache
preprocess_memory_efficient: false
hub_model_id: your/model
num_epochs: 1
"""


def test_the_basic_example_of_seed_002_runs(load: Load) -> None:
    """Its keys, and what Krill does without being asked."""
    config = load(BASIC + REST)
    assert config.sources == (DataSet(path=("large/dataset",), split="train", text_column="text"),)
    assert (config.tokenizer.path, config.out, config.seq_len) == ("gpt2/", "./artifacts/prepared", 2048)
    assert config.packing == PackingRules(strategy="wrapped", write=True)
    assert (config.filters.min_characters, config.filters.min_tokens) == (100, 150)
    assert (config.dedup, config.clean) == (DedupRules(), CleanRules())


def test_flat_and_nested_files_mean_the_same(load: Load) -> None:
    """Both generations of Krill's keys come to one configuration."""
    config = load(FLAT)
    assert config == load(NESTED)
    assert config.sources == (DataSet(path=("some/data",), split="train[:10_000]"),)
    assert config.tokenizer_rules.train is not None
    assert config.tokenizer_rules.train.vocab_size == 32_000
    assert (config.filters.min_tokens, config.shard_size, config.dedup) == (120, "100MB", DedupRules(index="./cache"))


def test_notes_name_what_is_ignored_or_needless(load: Load) -> None:
    """Keys of training, keys that nobody knows or needs, and what is another thing now."""
    load(FLAT + "zebra: 1\noutput_dir: x\ntrain: {arch: x}")
    notes = "\n".join(read_config("config.yaml").notes)
    ignored = "preprocess_chunk_size, preprocess_memory_efficient, hub_model_id, num_epochs, zebra, output_dir, train"
    assert f"Ignored, since preparing data takes no such keys: {ignored}." in notes
    assert "shard_size is the input that makes one shard" in notes


# ---- what is missing, mixed or wrong ----


def test_a_missing_tokenizer_is_named_with_the_ways_to_give_it(complaint: Callable[..., str], load: Load) -> None:
    """The document's own examples have none."""
    message = "config.yaml: tokenizer is missing. A configuration needs at least:"
    for line in ("", "vocab_size: 5", "tokenizer: {hub_id: null}", "tokenizer: {hub_id: , vocab_size: 5}"):
        assert complaint(BASIC + line).startswith(message)
    assert "datasets and tokenizer are missing" in complaint(CACHED)
    config = load(BASIC, "tokenizer=gpt2/")
    assert (config.tokenizer.path, config.out) == ("gpt2/", "prepared")
    notes = read_config("config.yaml", ["tokenizer=gpt2/"]).notes
    assert "dataset_prepared_path is not set: the store goes to prepared/, unless out is set." in notes


def test_keys_of_both_kinds_may_be_mixed(load: Load) -> None:
    """What the file says in our words stays; what it does not say is Krill's way."""
    text = BASIC + REST + "filters: {min_characters: 5, max_tokens: 900}\npacking: none\ndedup: near\nseed: 4\n"
    config = load(text + "preprocess_dedup_cache_dir: seen")
    filters = config.filters
    assert (filters.min_characters, filters.min_tokens, filters.max_tokens) == (5, 150, 900)
    assert (config.packing, config.seed) == ("none", 4)
    assert config.dedup == DedupRules(near=NearRules(), index="seen")
    assert load(BASIC + REST + "tokenizer: gpt2/\n").tokenizer.path == "gpt2/"
    assert load(NESTED + "out: other\n").out == "other"
    assert "preprocess.prepared_path is ignored: out is set otherwise." in read_config("config.yaml").notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NESTED.replace("1024", "long"), 'config.yaml:9: seq_len: must be a whole number, not "long".'),
        (NESTED.replace("100MB", "5XB"), 'config.yaml:12: shard_size: "5XB" is not a size.'),
        (FLAT.replace("100MB", "5KB"), "config.yaml:10: shard_size: must be at least 100 KB."),
        (NESTED.replace("path: some", "pth: some"), 'config.yaml:2: datasets.0.pth: no such key. Did you mean "path"?'),
        (NESTED.replace("  vocab_size", "  vocabulary"), "config.yaml:6: tokenizer.vocabulary: no such key."),
    ],
)  # fmt: skip
def test_mistakes_in_keys_of_krill_have_their_line(complaint: Callable[..., str], text: str, message: str) -> None:
    """The line is that of the file; the key is ours."""
    assert complaint(text).startswith(message)


def test_overrides_win_over_keys_of_krill(load: Load) -> None:
    """`--set` takes the place of what the file says."""
    assert load(NESTED, "out=o").out == "o"
    assert load(NESTED, "tokenizer=x").tokenizer.path == "x"
    assert load(FLAT, "dedup=off").dedup == OFF
    assert load(FLAT, "filters.min_tokens=7", "filters.min_characters=null").filters == FilterRules(min_tokens=7)


# ---- schema and examples ----


def test_the_schema_describes_every_key() -> None:
    """`milldam schema` prints the JSON schema that editors read."""
    schema = json.loads(CliRunner().invoke(main, ["schema"], catch_exceptions=False).stdout)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["required"] == ["datasets", "tokenizer", "out"]
    for block in [schema, *schema["$defs"].values()]:
        assert block["additionalProperties"] is False
        assert all(len(key["description"]) > 10 for key in block["properties"].values()), block["title"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load_and_name_files_that_exist(path: Path) -> None:
    """Seen from the project's root, an example's data and tokenizer are there."""
    config = load_config(path)
    for one in config.sources:
        assert all((PROJECT / name).exists() for name in one.paths)
    assert (PROJECT / config.tokenizer_rules.path).exists()


def test_one_example_has_every_key() -> None:
    """examples/preprocess.yaml shows each key in its block; those of a block that is off in a comment."""
    text = (PROJECT / "examples/preprocess.yaml").read_text(encoding="utf-8")
    source = yaml.safe_load(text)
    for name, kind in blocks_of(Config):
        here: Any = source
        for part in name.split(".") if name else ():
            here = here[part]
            here = here[0] if isinstance(here, list) else here
        keys = [key for block in kind.__mro__ for key in getattr(block, "__annotations__", ()) if key not in UNSHOWN]
        shown = here if isinstance(here, dict) else {key: 0 for key in keys if f"{key}: " in text}
        assert [key for key in keys if key not in shown] == [], f"missing in {name or 'the top level'}"
