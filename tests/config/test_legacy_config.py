"""Files of Krill: they run as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.config.conftest import Load

from milldam.config.legacy import _LEGACY, convert, is_legacy
from milldam.config.loading import LoadedConfig, load_config
from milldam.config.settings import DataSet
from milldam.rules import DedupRules, NearRules, PackingRules

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


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a text as krill.yaml, with overrides."""
    monkeypatch.chdir(tmp_path)

    def load_text(text: str, *overrides: str) -> LoadedConfig:
        Path("krill.yaml").write_text(text, encoding="utf-8")
        return load_config("krill.yaml", overrides)

    return load_text


# ---- what becomes of the keys ----


def test_the_basic_example_of_seed_002_runs(load: Load) -> None:
    """Its keys, and what Krill does without being asked."""
    config = load(BASIC + REST).config
    assert config.sources == (DataSet(path="large/dataset", split="train", text_column="text"),)
    assert (config.tokenizer, config.out, config.seq_len) == ("gpt2/", "./artifacts/prepared", 2048)
    assert config.packing == PackingRules(strategy="wrapped", write=True)
    assert (config.filters.min_characters, config.filters.min_tokens) == (100, 150)
    assert (config.dedup, config.clean) == ("exact", "default")


def test_flat_and_nested_files_mean_the_same(load: Load) -> None:
    """Both generations of Krill's keys come to one configuration."""
    flat, nested = load(FLAT), load(NESTED)
    assert flat.config == nested.config
    config = flat.config
    assert config.sources == (DataSet(path="some/data", split="train[:10_000]"),)
    assert config.tokenizer_rules.train is not None
    assert config.tokenizer_rules.train.vocab_size == 32_000
    assert (config.filters.min_tokens, config.shard_size, config.dedup) == (120, "100MB", DedupRules(index="./cache"))


def test_every_key_of_krill_is_understood() -> None:
    """No legacy key is left in the new form, and none of them is called unknown."""
    for text in (FLAT, NESTED):
        source = yaml.safe_load(text)
        made = convert(source)
        assert not is_legacy(made.config)
    named = set(yaml.safe_load(FLAT)) | {
        f"{a}.{b}" for a, keys in yaml.safe_load(NESTED).items() for b in keys if a != "datasets"
    }
    assert {".".join(map(str, path)) for path in _LEGACY} - named == {"memory_efficient_preprocess"}


def test_notes_name_what_is_ignored_or_needless(load: Load) -> None:
    """Keys of training, keys that nobody knows, keys that are no longer needed, and what is another thing now."""
    notes = "\n".join(load(FLAT + "zebra: 1\noutput_dir: x\ntrain: {arch: x}").notes)
    ignored = "hub_model_id, num_epochs, zebra, output_dir, train"
    assert f"Ignored, since preparing data takes no such keys: {ignored}." in notes
    assert "No longer needed: preprocess_chunk_size, preprocess_memory_efficient." in notes
    assert "shard_size is the input that makes one shard" in notes


# ---- what is missing, mixed or wrong ----


def test_a_missing_tokenizer_is_named_with_the_ways_to_give_it(complaint: Callable[..., str], load: Load) -> None:
    """The document's own examples have none."""
    said = "krill.yaml: tokenizer is missing. A configuration of Krill needs at least:"
    assert complaint(BASIC).startswith(said) and "  hub_tokenizer_id: " in complaint(BASIC)
    for line in (
        "hub_tokenizer_id:",
        "vocab_size: 5",
        "tokenizer: {hub_id: null}",
        "tokenizer: {hub_id: , vocab_size: 5}",
    ):
        assert complaint(BASIC + line).startswith(said)
    assert "datasets and tokenizer are missing" in complaint(CACHED)
    assert load(BASIC, "tokenizer=gpt2/").config.tokenizer == "gpt2/"
    assert load(BASIC, "hub_tokenizer_id=gpt2/").config.tokenizer == "gpt2/"


def test_without_a_prepared_path_the_store_goes_to_prepared(load: Load) -> None:
    """And the user is told."""
    loaded = load(BASIC, "tokenizer=gpt2/")
    assert loaded.config.out == "prepared"
    assert "dataset_prepared_path is not given: the store goes to prepared/." in loaded.notes
    assert not any("not given" in note for note in load(BASIC, "tokenizer=gpt2/", "out=x").notes)


def test_keys_of_both_kinds_may_be_mixed(load: Load) -> None:
    """What the file says in our words stays; what it does not say is Krill's way."""
    text = BASIC + REST + "filters: {min_characters: 5, max_tokens: 900}\npacking: none\ndedup: near\nseed: 4\n"
    config = load(text + "preprocess_dedup_cache_dir: seen").config
    filters = config.filters
    assert (filters.min_characters, filters.min_tokens, filters.max_tokens) == (5, 150, 900)
    assert (config.packing, config.seed) == ("none", 4)
    assert config.dedup == DedupRules(near=NearRules(), index="seen")
    assert load(BASIC + REST + "tokenizer: gpt2/\n").config.tokenizer == "gpt2/"
    other = load(NESTED + "out: other\n")
    assert other.config.out == "other" and "preprocess.prepared_path is ignored: out says otherwise." in other.notes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (NESTED.replace("1024", "long"), 'krill.yaml:9: preprocess.sequence_len: must be a whole number, not "long".'),
        (NESTED.replace("100MB", "5XB"), 'krill.yaml:12: preprocess.save_shard_size: "5XB" is not a size.'),
        (FLAT.replace("100MB", "5KB"), "krill.yaml:10: preprocess_save_shard_size: must be at least 100 KB."),
        (NESTED.replace("path: some", "pth: some"), 'krill.yaml:2: datasets.0.pth: no such key. Did you mean "path"?'),
        (NESTED.replace("  vocab_size", "  vocabulary"), "krill.yaml:6: tokenizer.vocabulary: no such key."),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_krills_words(complaint: Callable[..., str], text: str, said: str) -> None:
    """The line and the key are those of the file that the user has."""
    assert complaint(text).startswith(said)


def test_overrides_win_over_keys_of_krill(load: Load) -> None:
    """`--set` in our words or in Krill's takes the place of what the file says in either."""
    assert load(NESTED, "out=o").config.out == "o"
    assert load(NESTED, "hub_tokenizer_id=x").config.tokenizer_rules.path == "x"
    assert load(FLAT, "tokenizer.hub_id=x").config.tokenizer_rules.path == "x"
    assert load(NESTED, "tokenizer=x").config.tokenizer == "x"
    assert load(FLAT, "dedup=off").config.dedup == "off"
    assert load(FLAT, "filters.min_tokens=7", "filters.min_characters=").config.filters.min_tokens == 7
    assert load(NESTED, "preprocess.min_length=7").config.filters.min_tokens == 7
