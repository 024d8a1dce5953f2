"""Configuration files: what they may say, how mistakes are told, and that the documentation has every key."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from tests.config.conftest import Load
from tests.conftest import PROJECT
from tests.kit.jobs import TOKENIZER

import milldam
from milldam.cli import main
from milldam.cli.preprocess import json_schema, schema
from milldam.config.checking import MOST_PROBLEMS, defaults_of, keys_of
from milldam.config.loading import LoadedConfig, load_config
from milldam.config.settings import Config
from milldam.errors import ConfigError
from milldam.rules import DedupRules, FilterRules, NearRules, PackingRules

BASE = "datasets: a.jsonl\ntokenizer: gpt2/\nout: o\n"
SCHEMA = json_schema(Config, "milldam preprocess")
EXAMPLES = sorted((PROJECT / "examples").glob("*.yaml"))


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a text as config.yaml, with overrides."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, *overrides: str) -> LoadedConfig:
        Path("config.yaml").write_text(text, encoding="utf-8")
        return load_config("config.yaml", overrides)

    return load_text


# ---- what a file may say ----


def test_three_keys_are_enough(load: Load) -> None:
    """Everything but datasets, tokenizer and out has a default."""
    loaded = load(BASE)
    assert loaded.config == Config(datasets="a.jsonl", tokenizer="gpt2/", out="o")
    assert loaded.notes == []


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("limit: 100_000", "limit", 100_000),
        ("limit: 1e6", "limit", 1_000_000),
        ("limit: 010", "limit", 10),
        ("limit: null", "limit", None),
        ("limit: off", "limit", None),
        ("splits: {val: 1e-3}", "splits", {"val": 0.001}),
        ("splits: {on: .5}", "splits", {"on": 0.5}),
        ("memory: 512MB", "memory", "512MB"),
        ("memory: 1_000_000_000", "memory", 10**9),
        ("memory: 1e9", "memory", 10**9),
        ("strict: yes", "strict", True),
        ("clean: off", "clean", "off"),
        ("clean: no", "clean", "off"),
        ("clean: on", "clean", "default"),
        ("dedup: off", "dedup", "off"),
        ("dedup: false", "dedup", "off"),
        ("dedup: null", "dedup", "off"),
        ("dedup: Near", "dedup", "near"),
        ("dedup: true", "dedup", "exact"),
        ("dedup:", "dedup", "exact"),
        ("dedup: {method: off, near: on}", "dedup", DedupRules(method="off", near=NearRules())),
        ("packing: none", "packing", "none"),
        ("packing: null", "packing", "none"),
        ("packing: ~", "packing", "none"),
        ("packing: off", "packing", "none"),
        ("packing: on\nseq_len: 8", "packing", PackingRules()),
        ("filters:\n  # all of them are comments", "filters", FilterRules()),
    ],
)
def test_values_are_read_as_they_are_meant(load: Load, line: str, key: str, value: Any) -> None:
    """Numbers of all spellings, and words that YAML takes for booleans or null."""
    assert getattr(load(BASE + line).config, key) == value


def test_anchors_and_merge_keys_work(load: Load) -> None:
    """What YAML offers against repetition is understood; a block's own keys win."""
    text = "datasets:\n- &first {path: a, text_column: t}\n- <<: *first\n  path: b\ntokenizer: x\nout: o"
    first, second = load(text).config.sources
    assert (first.path, second.path, second.text_column) == ("a", "b", "t")


def test_a_dict_may_say_what_a_file_may() -> None:
    """Paths, tuples and None are understood; mistakes are told by their keys."""
    given = {"datasets": ({"path": Path("a")}, "b"), "tokenizer": Path("t"), "out": "o", "dedup": None, "limit": None}
    config = load_config(given, ["seed=3"]).config
    assert [one.path for one in config.sources] == ["a", "b"]
    assert (config.tokenizer, config.dedup, config.limit, config.seed) == ("t", "off", None, 3)
    with pytest.raises(ConfigError, match=r'^config: dedup\.normalise: no such key\. Did you mean "normalize"\?$'):
        load_config(given | {"dedup": {"normalise": True}})
    with pytest.raises(ConfigError, match=r'^config: seed: must be a whole number, not "<object'):
        load_config(given | {"seed": object()})
    assert load_config({"hub_tokenizer_id": "t", "datasets": "d"}).config.out == "prepared"


@given(st.text(max_size=60))
def test_any_text_loads_or_is_a_config_error(tmp_path: Path, text: str) -> None:
    """Nothing else escapes, whatever the file holds."""
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError):
        load_config(path)


# ---- mistakes ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dedup:\n  normalise: yes", 'config.yaml:5: dedup.normalise: no such key. Did you mean "normalize"?'),
        ("dedup:\n  treshold: 1", 'config.yaml:5: dedup.treshold: no such key. Did you mean "threshold" under dedup.n'),
        ("weight: 2", 'config.yaml:4: weight: no such key. Did you mean "weight" under datasets?'),
        ("shuffle: true", "config.yaml:4: shuffle: no such key. The order is made when training, from a seed: store."),
        ("bos_token: x", 'config.yaml:4: bos_token: no such key. Did you mean "bos" under tokenizer?'),
        ("num_proc: 2", 'config.yaml:4: num_proc: no such key. Did you mean "workers"?'),
        ("output_dir: x", 'config.yaml:4: output_dir: no such key. Did you mean "out"?'),
        ("test_size: 0.1", 'config.yaml:4: test_size: no such key. Did you mean "val" under splits?'),
        ("validation: {path: x, text_field: y}", 'config.yaml:4: validation.text_field: no such key. Did you mean "t'),
        ("clean: {sed: 2}", 'config.yaml:4: clean.sed: no such key. Did you mean "seed" at the top level?'),
        ("dedup: exct", 'config.yaml:4: dedup: must be off, exact, near, bloom or a block of keys, not "exct". Did'),
        ("invalid_utf8: x", 'config.yaml:4: invalid_utf8: must be drop, reject, replace or strict, not "x".'),
        ("seed: 1.5", "config.yaml:4: seed: must be a whole number, not 1.5."),
        ("seed: 1:30", 'config.yaml:4: seed: must be a whole number, not "1:30".'),
        ("seed: on", "config.yaml:4: seed: must be a whole number, not on."),
        ("strict: maybe", 'config.yaml:4: strict: must be true or false, not "maybe".'),
        ("filters: [1]", "config.yaml:4: filters: must be a block of keys, not a list."),
        ("splits: {val: .nan}", 'config.yaml:4: splits.val: must be a number, not ".nan".'),
        ("validation:\n- path: a\n-", "config.yaml:6: validation.1: must be a text or a block of keys, not empty."),
        ("validation:\n  split: a", "config.yaml:4: validation: the key path is missing."),
        ("filters: {language: on}", "config.yaml:4: filters.language: must be a block of keys, not on."),
        ("clean:\n  strip: on\n  strip: off", "config.yaml:6: clean.strip: given twice; first in line 5."),
        ("seed: !!python/name:os.system 1", "config.yaml:4: seed: the tag !!python/name:os.system has no meaning"),
        ("clean: !!set {strip}", "config.yaml:4: clean: the tag !!set has no meaning here."),
        ("filters: {min_tokens: -1}", "config.yaml:4: filters.min_tokens: must be at least 0."),
        ("filters:\n  c4: {max_word_length: 0}", "config.yaml:5: filters.c4.max_word_length: must be more than 0."),
        ("filters:\n  c4: maybe", 'config.yaml:5: filters.c4: must be true or false or a block of keys, not "maybe".'),
        # What Config itself finds out.
        ("splits: {val: 3}", "config.yaml:4: splits.val: 3.0 is not a share"),
        ("limit: 0", "config.yaml:4: limit: must be at least 1."),
        ("validation: {path: x, weight: 0}", "config.yaml:4: validation.weight: must be at least 1e-09."),
        ("seed: 1\nmemory: 5XB", 'config.yaml:5: memory: "5XB" is not a size.'),
        ("packing: wrapped", "config.yaml:4: packing: needs seq_len"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_place(complaint: Callable[..., str], text: str, said: str) -> None:
    """File, line, key, what is wrong, and the nearest right word, or the one for what other tools call so."""
    message = complaint(BASE + text)
    assert message.startswith(said)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "config.yaml: empty. A configuration needs at least:\n  datasets: corpus.jsonl\n"),
        ("# only a comment\n", "config.yaml: empty."),
        ("- a", "config.yaml: a list; keys are wanted."),
        ("corpus.jsonl", "config.yaml: a single value; keys are wanted."),
        ("out: o\n\tseed: 1", "config.yaml:2: not valid YAML: "),
        ("out: a: b", "config.yaml:1: not valid YAML: mapping values are not allowed here. A text with a colon"),
        ("datasets: *.jsonl", "config.yaml:1: not valid YAML: while scanning an alias"),
        ("datasets: *gone", "config.yaml:1: not valid YAML: found undefined alias 'gone'."),
        ("a: 1\n---\nb: 2", "config.yaml:2: not valid YAML: expected a single document"),
        ("a: [1,\n2", "config.yaml:2: not valid YAML: while parsing a flow sequence"),
        ("a: 1\nb: \x07", "config.yaml:2: a character that YAML does not allow (U+0007)."),
        ("[" * 900, "config.yaml: nested too deep."),
        ("a: &a [*a]", "config.yaml: too large or nested too deep for a configuration."),
        ("a: &a {<<: *a}", "config.yaml: nested too deep."),
        ("? [a]\n: 1", "config.yaml:1: a key must be a word."),
        ("seed: 1", "config.yaml: datasets, tokenizer and out are missing. A configuration needs at least:\n"),
        ("datasets: a\ntokenizer: b", "config.yaml: out is missing. A configuration needs at least:\n"),
        ("datasets: a\ntokenizer:\nout: o", "config.yaml:2: tokenizer: must be a text or a block of keys, not empty."),
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration_is_refused(complaint: Callable[..., str], text: str, said: str) -> None:
    """In a few words, with the line where there is one."""
    assert complaint(text).startswith(said)


def test_a_bomb_of_aliases_is_refused(complaint: Callable[..., str]) -> None:
    """Aliases that multiply do not fill the memory."""
    bomb = "a0: &a0 [x]\n" + "".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]\n" for k in range(1, 9))
    assert complaint(bomb) == "config.yaml: too large or nested too deep for a configuration."


def test_several_mistakes_are_told_at_once(complaint: Callable[..., str]) -> None:
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
    for name, said in {
        "gone.yaml": "gone.yaml: no such file.",
        ".": "a folder",
        "latin.yaml": "latin.yaml:2: not UTF-8 text.",
        "data.jsonl": "too large for a configuration",
    }.items():
        with pytest.raises(ConfigError, match=said):
            load_config(tmp_path / name)


# ---- --set ----


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("seed=7", "seed", 7),
        ("splits.val=1e-3", "splits", {"val": 0.001}),
        ("datasets=b.jsonl", "datasets", "b.jsonl"),
        ("datasets=*.jsonl", "datasets", "*.jsonl"),
        ("datasets=[a, b]", "datasets", ("a", "b")),
        ("datasets.1=b.jsonl", "datasets", ("a.jsonl", "b.jsonl")),
        ("dedup.near.threshold=0.7", "dedup", DedupRules(near=NearRules(threshold=0.7))),
        ("dedup=off", "dedup", "off"),
        ("out=a=b", "out", "a=b"),
        ("out= spaced ", "out", "spaced"),
    ],
)
def test_overrides_win_over_the_file(load: Load, override: str, key: str, value: Any) -> None:
    """Values are YAML; blocks on the way are made."""
    assert getattr(load(BASE, override).config, key) == value


def test_overrides_reach_into_short_forms(load: Load) -> None:
    """A word that stands for a block is spelled out when a key of the block is set."""
    config = load(BASE + "dedup: bloom\npacking: best_fit", "tokenizer.bos=auto", "datasets.0.text_column=body",
                  "dedup.normalize=yes", "packing.buffer=5", "seq_len=8").config  # fmt: skip
    assert (config.tokenizer_rules.path, config.tokenizer_rules.bos) == ("gpt2/", "auto")
    assert (config.sources[0].path, config.sources[0].text_column) == ("a.jsonl", "body")
    assert config.dedup == DedupRules(method="bloom", normalize=True)
    assert config.packing == PackingRules(strategy="best_fit", buffer=5)


def test_an_empty_override_takes_a_value_away(load: Load) -> None:
    """`--set limit=` is as if the file did not say it."""
    assert load(BASE + "limit: 3", "limit=").config.limit is None
    assert load(BASE + "dedup: off", "dedup=").config.dedup == "exact"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("dedup.treshold=1", 'overrides dedup.treshold: no such key. Did you mean "threshold" under dedup.near?'),
        ("sed=1", 'overrides sed: no such key. Did you mean "seed"?'),
        ("a.0.b=1", "overrides a: no such key."),
        ("seed=x", 'overrides seed: must be a whole number, not "x".'),
        ("limit=0", "overrides limit: must be at least 1."),
        ("packing.write=true", "overrides packing: needs seq_len"),
        ("seed", "overrides seed: write it as key=value"),
        ("=1", "overrides =1: write it as key=value"),
        ("a..b=1", "overrides a..b=1: write it as key=value"),
        ("datasets=[", "overrides datasets=[: not valid YAML."),
        ("out.x=1", "overrides out.x: out is 'o', which has no keys below."),
        ("datasets.2.path=x", "overrides datasets.2: datasets is a list of 1. Write datasets.0 for the first"),
    ],
)
def test_a_wrong_override_is_told_as_such(complaint: Callable[..., str], override: str, said: str) -> None:
    """The same errors, with --set as the place."""
    assert complaint(BASE, override).startswith(said)


# ---- the schema, the documentation, the examples ----


def blocks(kind: type = Config, name: str = "") -> Iterator[tuple[str, type]]:
    """(dotted name, dataclass) of every block, from the top to the bottom."""
    yield name, kind
    for key, kinds in keys_of(kind).items():
        if kinds.inner and key != "validation":
            yield from blocks(kinds.inner, f"{name}.{key}".removeprefix("."))


def rows(kind: type) -> dict[str, str]:
    """By key, the row that docs/config.md must have, as far as it follows from the code, and the docstring."""
    described = {one["title"]: one for one in [SCHEMA, *SCHEMA["$defs"].values()]}
    properties = described["milldam preprocess" if kind is Config else kind.__name__]["properties"]
    made = {}
    for key, kinds in keys_of(kind).items():
        row = f"| `{key}` | {kinds} | {default_text(kind, key)} | "
        made[row] = f"{properties[key]['description']} |"
    return made


def default_text(kind: type, key: str) -> str:
    if key not in defaults_of(kind):
        return "**required**"
    default = defaults_of(kind)[key]
    if default is None or default in ((), {}) or dataclasses.is_dataclass(default):
        return "not set"
    shown = list(default) if isinstance(default, tuple) else default
    return f"`{shown if isinstance(shown, str) else json.dumps(shown)}`".replace("|", "\\|")


def test_every_key_has_a_description() -> None:
    """An editor can explain each key, and the schema is one of the known kind."""
    made = SCHEMA
    assert made["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert made["required"] == ["datasets", "tokenizer", "out"]
    for block in [made, *made["$defs"].values()]:
        assert block["additionalProperties"] is False
        for key, what in block["properties"].items():
            assert what.get("description"), f"{block['title']}.{key} has no docstring"
            assert len(what["description"]) > 10


def test_the_schema_command_prints_json() -> None:
    """`milldam schema` gives what editors read."""
    done = CliRunner().invoke(schema)
    assert done.exit_code == 0
    assert json.loads(done.stdout) == SCHEMA


@pytest.mark.parametrize(("name", "kind"), list(blocks()), ids=lambda one: one if isinstance(one, str) else "")
def test_the_documentation_has_every_key(name: str, kind: type) -> None:
    """docs/config.md has a table for each block, with every key, what it takes, its default and its meaning."""
    text = (PROJECT / "docs/config.md").read_text(encoding="utf-8")
    heading = f"\n## {f'`{name}`' if name else 'The keys'}\n"
    assert heading in text
    section = text.split(heading, 1)[1].split("\n## ", 1)[0]
    missing = "\n".join(row + meaning for row, meaning in rows(kind).items() if f"\n{row}" not in section)
    assert not missing, f"docs/config.md lacks or has otherwise, under {heading.strip()}:\n{missing}"
    listed = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert listed == list(keys_of(kind))


def test_configurations_in_the_documentation_load(tmp_path: Path) -> None:
    """Every YAML block that names a tokenizer is a whole file, and right."""
    text = (PROJECT / "docs/config.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```yaml.*?\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    whole = [one for one in blocks if "tokenizer" in one]
    assert len(whole) >= 3
    for number, one in enumerate(whole):
        path = tmp_path / f"{number}.yaml"
        path.write_text(one, encoding="utf-8")
        load_config(path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load_and_name_files_that_exist(path: Path) -> None:
    """Seen from the project's root, an example's data and tokenizer are there."""
    config = load_config(path).config
    for one in config.sources:
        assert all((PROJECT / name).exists() for name in one.paths)
    assert (PROJECT / config.tokenizer_rules.path).exists()


def test_one_example_has_every_key() -> None:
    """examples/preprocess.yaml shows each key in its block; those of a block that is off in a comment."""
    path = PROJECT / "examples/preprocess.yaml"
    text = path.read_text(encoding="utf-8")
    source = yaml.safe_load(text)
    for name, kind in blocks():
        here: Any = source
        for part in name.split(".") if name else ():
            here = here[part]
            here = here[0] if isinstance(here, list) else here
        missing = [
            key for key in keys_of(kind) if (key not in here if isinstance(here, dict) else f"{key}: " not in text)
        ]
        assert missing == [], f"missing in {name or 'the top level'}"


# ---- files beside it ----


@pytest.mark.parametrize("datasets", ["texts/a.jsonl", "[{path: 'texts/*.jsonl'}]"])
def test_paths_that_lead_nowhere_are_found_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, datasets: str
) -> None:
    """Input alone, not the output; each is named. What is in the working directory comes first."""
    (tmp_path / "job/texts").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "job/texts/a.jsonl").write_text('{"text": "some words of one document"}\n')
    shutil.copy(TOKENIZER, tmp_path / "job/tokenizer.json")
    (tmp_path / "job/job.yaml").write_text(f"datasets: {datasets}\ntokenizer: tokenizer.json\nout: made\n")
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = CliRunner().invoke(main, ["preprocess", "../job/job.yaml", "--memory", "4GB"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for name in (re.search(r"texts/[^',}]*", datasets), re.match("tokenizer.json", "tokenizer.json")):
        assert name and f"Note: {name[0]}: not in the working directory" in done.stderr
    assert (len(milldam.open("made")), Path("../job/made").exists()) == (1, False)
    Path("texts").mkdir()
    Path("texts/a.jsonl").write_text('{"text": "here"}\n{"text": "and here"}\n')
    done = CliRunner().invoke(main, ["preprocess", "../job/job.yaml", "-o", "other", "--memory", "4GB"])
    assert len(milldam.open("other")) == 2
