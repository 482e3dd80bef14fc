"""`prepare_tokens`: what files become, and that interruptions leave no trace in the bytes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepwell.errors import ConfigError
from deepwell.train.data.documents import FileDocuments, TextDocuments
from deepwell.train.data.prepare import prepare_tokens
from deepwell.train.data.token_files import TokenFolder
from deepwell.train.data.tokenizer import make_tokenizer


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a prepared folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def texts_of(folder: Path, split: str = "train") -> list[str]:
    """The documents, from the bytes that were written."""
    tokens = TokenFolder.open(folder / split)
    ids, starts = tokens.read(0, len(tokens))
    ends = [*starts[1:].tolist(), len(ids)]
    return [bytes(ids[a : b - 1].tolist()).decode() for a, b in zip(starts.tolist(), ends, strict=True)]


@pytest.fixture
def inputs(tmp_path: Path) -> list[Path]:
    rng = random.Random(0)
    folder = tmp_path / "in"
    (folder / "b" / ".hidden").mkdir(parents=True)
    (folder / "b" / "z.md").write_text("# z")
    (folder / "a.txt").write_text("été")
    (folder / "settings.json").write_text("{}")
    (folder / "b" / ".hidden" / "x.txt").write_text("hidden")
    lines = [json.dumps({"text": f"line {n} " + "y" * rng.randrange(60), "n": n}) for n in range(300)]
    (tmp_path / "lines.jsonl").write_text("\n".join([*lines[:5], "", *lines[5:]]) + "\n")
    (tmp_path / "list.json").write_text(json.dumps([{"text": "one"}, "two", {"text": ""}]))
    return [folder, tmp_path / "lines.jsonl", tmp_path / "list.json"]


def test_files_become_documents_in_order(inputs: list[Path], tmp_path: Path) -> None:
    found = prepare_tokens(inputs, tmp_path / "out")
    texts = texts_of(tmp_path / "out")
    assert texts[:2] == ["été", "# z"]
    assert [text.split()[1] for text in texts[2:302]] == [str(n) for n in range(300)]
    assert texts[302:] == ["one", "two"]
    assert (found["read"], found["empty"], found["resumed"]) == (305, 1, 0)
    assert found["splits"]["train"]["documents"] == 304


def test_held_out_documents_are_chosen_by_content(tmp_path: Path) -> None:
    texts = [f"document {n % 150}" for n in range(300)]
    prepare_tokens(TextDocuments(texts), tmp_path / "a", val_fraction=0.2)
    prepare_tokens(TextDocuments(texts[::-1]), tmp_path / "b", val_fraction=0.2)
    train, held = texts_of(tmp_path / "a", "train"), texts_of(tmp_path / "a", "val")
    assert sorted(train + held) == sorted(texts)
    assert not set(train) & set(held)
    assert 30 <= len(held) <= 90
    assert sorted(held) == sorted(texts_of(tmp_path / "b", "val"))
    with pytest.raises(ConfigError, match="leave nothing for val"):
        prepare_tokens(TextDocuments(["one"]), tmp_path / "c", val_fraction=1e-9)


def test_long_texts_are_cut_at_line_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepwell.train.data.documents.LONGEST_TEXT", 20)
    text = "".join(f"line number {n}\n" for n in range(10))
    (tmp_path / "long.txt").write_text(text)
    prepare_tokens([tmp_path / "long.txt"], tmp_path / "out")
    parts = texts_of(tmp_path / "out")
    assert "".join(parts) == text and len(parts) == 5
    assert all(part.endswith("\n") for part in parts)


class Stop(BaseException):
    """An interruption that no handler expects."""


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_interruptions_anywhere_leave_no_trace(
    inputs: list[Path], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"val_fraction": 0.1, "shard_tokens": 2000, "commit_chars": 400}
    monkeypatch.setattr(os, "fsync", lambda _: None)
    prepare_tokens(inputs, tmp_path / "whole", **options)
    owner = os if name == "fsync" else Path
    real = getattr(owner, name)
    calls, limit, interrupted = 0, 0, 0

    def stop(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if calls == limit:
            raise Stop
        return real(*arguments)

    # Each call is interrupted one write later than the one before, and goes on from where that came to.
    for turn in range(1, 100):
        calls, limit = 0, turn
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stop)
            try:
                found = prepare_tokens(inputs, tmp_path / "torn", **options)
                break
            except Stop:
                interrupted += 1
                with pytest.raises(ConfigError, match="data"):
                    TokenFolder.open(tmp_path / "torn")
    assert interrupted > 5 and found["resumed"] > 200
    assert content(tmp_path / "torn") == content(tmp_path / "whole")


_CHILD = """
import sys, time
from deepwell.train.data import prepare
slow = prepare._TokenWriter.add
def add(self, *rest):
    time.sleep(0.004)
    slow(self, *rest)
prepare._TokenWriter.add = add
prepare.prepare_tokens([sys.argv[1]], sys.argv[2], val_fraction=0.1, shard_tokens=3000, commit_chars=300)
"""


def test_killed_processes_and_the_rest_write_the_same_bytes(inputs: list[Path], tmp_path: Path) -> None:
    options = {"val_fraction": 0.1, "shard_tokens": 3000, "commit_chars": 300}
    prepare_tokens([inputs[1]], tmp_path / "whole", **options)
    torn, progress = tmp_path / "torn", tmp_path / "torn" / "progress.json"
    resumed = []
    for _ in range(2):
        before = progress.read_bytes() if progress.exists() else b""
        child = subprocess.Popen([sys.executable, "-c", _CHILD, str(inputs[1]), str(torn)])
        deadline = time.monotonic() + 30
        while (progress.read_bytes() if progress.exists() else b"") == before and child.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(0.05)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, "it was done before it was killed"
        resumed.append(json.loads(progress.read_text())["read"])
    assert 0 < resumed[0] < resumed[1] < 300
    found = prepare_tokens([inputs[1]], torn, **options)
    assert found["resumed"] == resumed[1]
    assert found["wrote"] == 300 - resumed[1]
    assert content(torn) == content(tmp_path / "whole")


def test_what_a_killed_write_left_is_no_file_of_others(tmp_path: Path) -> None:
    prepare_tokens(TextDocuments(["a"]), tmp_path / "whole")
    left = [
        tmp_path / "out" / name for name in (".progress.json.12-34.partial", "train/.train-00000.json.12-34.partial")
    ]
    left[1].parent.mkdir(parents=True)
    for path in left:
        path.write_text("{")
    prepare_tokens(TextDocuments(["a"]), tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_second_call_does_nothing_or_says_what_differs(inputs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_tokens(inputs, out)
    before = content(out)
    again = prepare_tokens(inputs, out)
    assert again["wrote"] == 0 and content(out) == before
    with pytest.raises(ConfigError, match=r"seq_len was None, now 64"):
        prepare_tokens(inputs, out, seq_len=64)
    inputs[2].write_text('["other"]')
    with pytest.raises(ConfigError, match="input files are others"):
        prepare_tokens(inputs, out)
    assert content(out) == before
    prepare_tokens(inputs, out, restart=True)
    assert texts_of(out)[-1] == "other"


def test_folders_of_others_are_left_alone(inputs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "home"
    out.mkdir()
    (out / "thesis.doc").write_text("mine")
    for restart in (False, True):
        with pytest.raises(ConfigError, match=r"holds other files \(thesis"):
            prepare_tokens(inputs, out, restart=restart)
    assert (out / "thesis.doc").read_text() == "mine"
    with pytest.raises(ConfigError, match="is a file"):
        prepare_tokens(inputs, out / "thesis.doc")


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    def texts():
        yield "a"
        with pytest.raises(ConfigError, match="another process"):
            prepare_tokens(TextDocuments(["b"]), tmp_path / "out")
        yield "c"

    prepare_tokens(TextDocuments(texts()), tmp_path / "out")
    assert texts_of(tmp_path / "out") == ["a", "c"]


def test_a_full_disk_is_said_and_survived(inputs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    prepare_tokens(inputs, tmp_path / "whole", commit_chars=400)
    calls = 0

    def full(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 9:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"No space left on device.*same call to go on"):
            prepare_tokens(inputs, tmp_path / "torn", commit_chars=400)
    assert prepare_tokens(inputs, tmp_path / "torn", commit_chars=400)["resumed"] > 0
    assert content(tmp_path / "torn") == content(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("x.jsonl", '{"text": "a"}\n{"text"\n', "the line that ends at byte 22 is no JSON"),
        ("x.jsonl", '{"body": "a"}\n', "has no 'text' but 'body': give --text-key"),
        ("x.jsonl", '{"text": 3}\n', "the text is a int"),
        ("x.json", "nothing", "is no JSON"),
        ("x.json", "[[1]]", "record 0: the text is a list"),
        ("x.txt", "", "0 documents .* leave nothing for train"),
        ("x.exe", "MZ", "of no known kind"),
        ("", "", "holds no .txt .md .py"),
        ("absent", None, "no file or folder"),
    ],
)
def test_wrong_inputs_are_named(tmp_path: Path, name: str, data: str | None, words: str) -> None:
    path = tmp_path / "in" / name
    (tmp_path / "in").mkdir()
    if name and data is not None:
        path.write_text(data)
    with pytest.raises(ConfigError, match=words):
        prepare_tokens([path], tmp_path / "out")


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    for options, words in (
        ({"seq_len": 1}, "--seq-len is 1"),
        ({"val_fraction": 1.0}, "--val-fraction is 1.0"),
        ({"shard_tokens": 0}, "--shard-tokens is 0"),
        ({"tokenizer": "absent.json"}, "no file absent.json"),
        ({"tokenizer": 3}, "tokenizer is a int"),
        ({"eos": "x"}, "--eos is 'x'"),
    ):
        with pytest.raises(ConfigError, match=words):
            prepare_tokens([tmp_path / "a.txt"], tmp_path / "out", **options)
    with pytest.raises(ConfigError, match="needs an input"):
        prepare_tokens([], tmp_path / "out")
    with pytest.raises(ConfigError, match="document 1 is a int"):
        prepare_tokens(TextDocuments(["a", 1]), tmp_path / "out")  # type: ignore[list-item]


def test_parquet_without_pyarrow_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        FileDocuments([tmp_path / "x.parquet"])


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"body": ["a", "b", "c"]}), tmp_path / "x.parquet")
    prepare_tokens([tmp_path / "x.parquet"], tmp_path / "out", text_key="body")
    assert texts_of(tmp_path / "out") == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="no column 'text' but body"):
        prepare_tokens([tmp_path / "x.parquet"], tmp_path / "other")
    (tmp_path / "y.parquet").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="no Parquet"):
        prepare_tokens([tmp_path / "y.parquet"], tmp_path / "other", restart=True)


def test_broken_characters_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\xff\xfeb")
    (tmp_path / "b.jsonl").write_text('{"text": "x\\ud800y"}\n')
    prepare_tokens([tmp_path / "a.txt", tmp_path / "b.jsonl"], tmp_path / "out")
    assert texts_of(tmp_path / "out") == ["a\ufffd\ufffdb", "x?y"]


def test_tokenizer_files_and_objects(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "</s>": 7}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.enable_padding(length=9)  # a saved tokenizer may pad; documents are not padded
    file = tmp_path / "tokenizer.json"
    words.save(str(file))
    found = prepare_tokens(TextDocuments(["a b", "b \ud800"]), tmp_path / "out", tokenizer=str(file))
    split = found["splits"]["train"]
    assert (split["vocab"], split["eos"], split["tokenizer"]) == (8, 7, "tokenizer.json")
    assert TokenFolder.open(tmp_path / "out").read(0, 6)[0].tolist() == [1, 2, 7, 2, 0, 7]
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert make_tokenizer(words, eos="a").eos == 1
    assert make_tokenizer(tmp_path).vocab == 8  # a folder that holds tokenizer.json
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "b"}}')
    assert make_tokenizer(tmp_path).eos == 2
    with pytest.raises(ConfigError, match="no token 'zz'"):
        make_tokenizer(words, eos="zz")
    for data, text in (
        ("{}", "names no model"),
        ("x", "is no tokenizer's JSON"),
        ('{"model": 1}', "is no tokenizer's"),
    ):
        (tmp_path / "bad.json").write_text(data)
        with pytest.raises(ConfigError, match=text):
            make_tokenizer(tmp_path / "bad.json")


@pytest.mark.slow  # for the seconds that importing transformers takes
def test_tokenizers_of_transformers() -> None:
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "</s>": 7}, unk_token="<unk>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>")
    assert [ids.tolist() for ids in make_tokenizer(fast).encode(["a b", "b"])] == [[1, 2], [2]]
    fast.eos_token = None
    with pytest.raises(ConfigError, match="no eos_token"):
        make_tokenizer(fast)
