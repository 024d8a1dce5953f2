"""Words of other tools -> where milldam has what they mean: for the hint when somebody tries one here."""

from __future__ import annotations

_SETTINGS = {
    "overwrite": ("force", "overwrite_output_dir", "overwrite_cache", "clobber"),
    "out": ("output", "output_dir", "output_path", "output_prefix", "out_dir", "save_path", "dataset_dir"),
    "executor": ("engine", "runner"),
    "workers": ("num_workers", "num_proc", "nproc", "n_jobs", "num_jobs", "jobs", "threads", "num_threads", "cpus"),
    "memory": ("max_memory", "memory_limit", "mem", "ram"),
    "limit": ("max_samples", "max_docs", "max_documents", "num_samples", "num_documents", "samples"),
    "datasets.0.path": ("data", "data_path", "data_files", "data_dir", "input", "inputs", "train_file", "dataset"),
    "datasets.0.subset": ("config_name", "dataset_config", "dataset_config_name"),
    "datasets.0.text_column": (
        "column", "field", "key", "json_key", "json_keys", "jsonl_key", "text_key", "text_field", "content_field",
        "text_column_name", "dataset_text_field",
    ),
    "tokenizer": (
        "model", "model_name", "model_path", "pretrained", "tokenizer_name", "tokenizer_path", "tokenizer_model",
        "tokenizer_type", "tokenizer_name_or_path", "vocab_file", "encoding",
    ),
    "tokenizer.bos": ("bos_token", "add_bos", "add_bos_token", "prepend_bos"),
    "tokenizer.eos": ("eos_token", "eos_text", "add_eos", "add_eos_token", "append_eos", "append_eod", "eod"),
    "seq_len": (
        "max_length", "max_len", "max_seq_len", "max_seq_length", "sequence_len", "seq_length", "sequence_length",
        "block_size", "context_length", "context_size", "chunk_size",
    ),
    "splits.val": (
        "val_split", "validation_split", "val_ratio", "val_size", "valid_split", "test_size", "test_split",
        "split_ratio", "train_split",
    ),
    "dedup": ("deduplicate", "dedupe", "deduplication", "minhash"),
    "filters.language": ("lang", "languages"),
    "filters.min_characters": ("min_length", "min_len", "min_chars"),
}  # fmt: skip
_SENTENCES = {
    "The order is made when training, from a seed: store.windows(128).batches(4, seed=0).": (
        "shuffle", "seed", "shuffle_seed", "shuffle_buffer", "randomize", "buffer_size",
    ),
    "Batches are made when training: store.windows(128).batches(4).": ("batch_size", "batch", "drop_last", "padding"),
    "How often data is read is up to training: batches(..., epochs=3).": ("epochs", "num_epochs"),
    "Run the same command to resume.": ("resume", "restart", "continue", "resume_from_checkpoint"),
    "Input is always read as a stream.": ("stream", "streaming"),
    "What is done is kept in the output folder; there is no other cache.": ("cache_dir", "cache", "use_cache"),
    "Text is not changed that way; a function of your own can: clean.function.": ("lowercase", "do_lower_case"),
}  # fmt: skip
_MEANT = {word: path for path, words in _SETTINGS.items() for word in words}
_SAID = {word: sentence for sentence, words in _SENTENCES.items() for word in words}


def meant_setting(word: str) -> str | None:
    """The setting that is called so elsewhere, by its place in a configuration.

    >>> meant_setting("--num-proc"), meant_setting("bos_token"), meant_setting("workers")
    ('workers', 'tokenizer.bos', None)
    """
    return _MEANT.get(_plain(word))


def said_of(word: str) -> str | None:
    """What to say of a word for which there is no setting, since there need be none."""
    return _SAID.get(_plain(word))


def _plain(word: str) -> str:
    return word.lstrip("-").replace("-", "_").lower()
