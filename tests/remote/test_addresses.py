"""Addresses that can't be read, and the options that they need: over real HTTP, from a server of this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.kit.jobs import TOKENIZER, run_milldam, write_lines

import milldam
from milldam.remote import place_at
from milldam.stores.verify import verify

pytest.importorskip("s3fs")
SECRET = "very-secret"
DENY = {"Effect": "Deny", "Principal": "*", "Action": ["s3:GetObject", "s3:ListBucket"], "Resource": ["*"]}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server with the bucket `texts`, and `locked`, which nobody may read."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    import s3fs

    client = s3fs.S3FileSystem(key="k", secret=SECRET, endpoint_url=url, skip_instance_cache=True)
    for bucket in ("texts", "locked"):
        client.makedirs(bucket, exist_ok=True)
        lines = (json.dumps({"text": f"document {number} " + "of some words " * 20}) for number in range(50))
        client.pipe(f"{bucket}/a.jsonl", "\n".join(lines).encode())
    client.pipe("locked/a.jsonl/milldam.json", b"{}")
    client.call_s3("put_bucket_policy", Bucket="locked", Policy=json.dumps({"Statement": [DENY]}))
    yield url
    server.stop()


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody's credentials, and no question to a machine in the cloud."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setenv("HOME", str(tmp_path))


def log_in(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": SECRET, "ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(f"AWS_{name}", value)


def refused(*words: object) -> str:
    """What a command says that ends with the exit code of input, in a few lines."""
    done = run_milldam(*words, code=3)
    assert "bug" not in done.stderr and SECRET not in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3
    return str(done.stderr)


COMMANDS = (["tokenize", "s3://{}", "-o", "made", "--tokenizer", TOKENIZER], ["stats", "s3://{}"])


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_credentials_are_no_bug(command: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of input and of a store: what is missing, for which address, and where it comes from."""
    monkeypatch.chdir(tmp_path)
    told = refused(*(str(word).format("texts/a.jsonl") for word in command))
    assert "s3://texts/a.jsonl" in told and "Unable to locate credentials" in told and "docs/remote.md" in told


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("address", ["locked/a.jsonl", "no-such-bucket/a.jsonl"])
def test_what_may_not_be_read_and_buckets_that_are_missing_are_no_bug(
    command: list[Any], address: str, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that answers 403 or 404."""
    monkeypatch.chdir(tmp_path)
    log_in(monkeypatch, endpoint)
    told = refused(*(str(word).format(address) for word in command))
    assert ("no permission" if "locked" in address else 'there is no bucket "no-such-bucket"') in told


def test_options_of_a_configuration_open_addresses_and_stay_secret(endpoint: str, tmp_path: Path) -> None:
    """In the process and its workers. No file of the run holds a secret."""
    options = {"key": "k", "secret": SECRET, "endpoint_url": endpoint}
    config = {"datasets": "s3://texts/a.jsonl", "tokenizer": str(TOKENIZER), "memory": "2GB", "workers": 2}
    config |= {"out": str(tmp_path / "made"), "storage_options": {"s3": options}}
    (tmp_path / "job.yaml").write_text(json.dumps(config))
    run_milldam("preprocess", tmp_path / "job.yaml", cwd=tmp_path)
    made = milldam.open(tmp_path / "made")
    texts = sorted(made.decode(document) for document in made)
    assert len(texts) == 50 and texts[0].startswith("document 0 of some")
    held = [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert held == [tmp_path / "job.yaml"]


def test_a_store_on_s3_is_read_and_verified(endpoint: str, tmp_path: Path) -> None:
    """Documents, text and batches are those of the folder; secrets are nowhere shown."""
    options = {"key": "k", "secret": SECRET, "client_kwargs": {"endpoint_url": endpoint}}
    lines = write_lines(tmp_path / "c.jsonl", ["one two three", "four", "five six"])
    here = milldam.tokenize(lines, tmp_path / "s", tokenizer=TOKENIZER, workers=1)
    import s3fs

    s3fs.S3FileSystem(**options).put(str(tmp_path / "s"), "texts/corpus.milldam", recursive=True)
    address = "s3://texts/corpus.milldam"
    store = milldam.open(address, cache="1MB", cache_dir=tmp_path / "cache", storage_options=options)
    assert isinstance(store, milldam.Store)
    assert [document.tolist() for document in store] == [document.tolist() for document in here]
    assert store.decode(store[0]) == here.decode(here[0])
    for one, other in zip(store.windows(2).batches(2), here.windows(2).batches(2), strict=True):
        assert all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))
    assert list(verify(place_at(address, storage_options=options))) == []
    assert repr(store).startswith("Store('s3://texts/corpus.milldam': 3 documents")
    assert "secret" not in repr(store) + repr(store.windows(2)) + repr(store.place)
