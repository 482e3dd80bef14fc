"""Token files: windows and masks by hand, word sizes at their border, and every kind of damage by name."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from deepwell.errors import ConfigError
from deepwell.train.data.documents import TextDocuments
from deepwell.train.data.prepare import prepare_tokens
from deepwell.train.data.token_files import Shard, TokenFolder, describe, dtype_for
from deepwell.train.data.tokenizer import ByteTokenizer
from deepwell.train.data.windows import TokenSamples

E = 256  # the end token of bytes


def write(folder: Path, texts: list[str], **options) -> Path:
    prepare_tokens(TextDocuments(texts), folder, **options)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "data", ["abc", "de", "", "fghij"])


def test_windows_and_masks_are_exact(folder: Path) -> None:
    a = ord("a")
    # a b c E | d e E f | g h i j | E
    samples = TokenSamples(folder, 4)
    assert len(samples) == 3
    expected = [
        ([a, a + 1, a + 2, E], [-100, a + 1, a + 2, E], [0, 1, 2, 3]),
        ([a + 3, a + 4, E, a + 5], [-100, a + 4, E, -100], [0, 1, 2, 0]),
        ([a + 6, a + 7, a + 8, a + 9], [a + 6, a + 7, a + 8, a + 9], [0, 1, 2, 3]),  # a document goes on: no start
    ]
    for index, (ids, labels, positions) in enumerate(expected):
        sample = samples[index]
        assert sample["input_ids"].tolist() == ids
        assert sample["labels"].tolist() == labels
        assert sample["position_ids"].tolist() == positions
        assert {value.dtype for value in sample.values()} == {torch.int64}
    plain = TokenSamples(folder, 4, document_mask=False)[1]
    assert plain.keys() == {"input_ids", "labels"}
    assert plain["labels"].tolist() == plain["input_ids"].tolist() == expected[1][0]
    with pytest.raises(IndexError):
        samples[3]


def test_the_tail_is_dropped_or_padded(folder: Path) -> None:
    tail = TokenSamples(folder, 4, keep_tail=True)
    assert len(tail) == 4
    assert tail[3]["input_ids"].tolist() == [E] * 4
    assert tail[3]["labels"].tolist() == [E, -100, -100, -100]
    assert tail[3]["position_ids"].tolist() == [0, 0, 1, 2]  # padding is a document of its own
    plain = TokenSamples(folder, 4, keep_tail=True, document_mask=False)[3]
    assert plain["labels"].tolist() == [E, -100, -100, -100]
    whole = TokenSamples(folder, 13, keep_tail=True)
    assert len(whole) == 1 and (whole[0]["labels"] == -100).sum() == 3
    with pytest.raises(ConfigError, match="13 tokens, no window of seq_len 14"):
        TokenSamples(folder, 14)


def test_shards_do_not_change_the_windows(tmp_path: Path) -> None:
    texts = ["x" * length for length in (1, 5, 2, 9, 3, 3, 7, 1, 1, 4)]
    one = TokenSamples(write(tmp_path / "one", texts), 4, keep_tail=True)
    many_folder = TokenFolder.open(write(tmp_path / "many", texts, shard_tokens=5))
    many = TokenSamples(many_folder, 4, keep_tail=True)
    assert len(many_folder.shards) > 4 and many_folder.documents == 10
    for index in range(len(one)):
        for name, value in one[index].items():
            assert torch.equal(value, many[index][name]), (index, name)
    # A list of shards is the same as their folder.
    listed = TokenFolder.open([shard.path for shard in many_folder.shards])
    assert listed.sha256 == many_folder.sha256


class Vocabulary(ByteTokenizer):
    """Bytes, with a vocabulary that is said to be larger and an end token at its end."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.eos = vocab, vocab - 1


@pytest.mark.parametrize(
    ("vocab", "word"), [(65_535, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (1 << 32, "uint32")]
)
def test_words_are_as_wide_as_the_vocabulary_needs(tmp_path: Path, vocab: int, word: str) -> None:
    folder = TokenFolder.open(write(tmp_path / "data", ["ab"], tokenizer=Vocabulary(vocab)))
    assert folder.info.dtype == word
    tokens, starts = folder.read(0, 3)
    assert tokens.tolist() == [97, 98, vocab - 1]
    assert starts.tolist() == [0]


@pytest.mark.parametrize("vocab", [0, (1 << 32) + 1])
def test_impossible_vocabularies_are_refused(vocab: int) -> None:
    with pytest.raises(ConfigError, match="vocabulary"):
        dtype_for(vocab)


def _cut(folder: Path) -> None:
    path = folder / "train" / "00000.tokens"
    path.write_bytes(path.read_bytes()[:-1])


def _edit(name: str, **changes):
    def damage(folder: Path) -> None:
        path = folder / "train" / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def _replace(name: str, data: bytes):
    return lambda folder: (folder / "train" / name).write_bytes(data)


DAMAGE = [
    (_cut, "00000.tokens has 25 bytes, 00000.json says 26"),
    (_edit("00000.json", count=12), "00000.json is damaged"),
    (_edit("00000.json", schema=2), "schema 2, this version reads 1"),
    (_edit("00000.json", format="other"), "not of Deepwell's token files"),
    (_replace("00000.json", b"{"), "00000.json cannot be read"),
    (_replace("00000.json", b"[1]"), "not of Deepwell's token files"),
    (_replace("00000.docs", np.asarray([0, 4, 99], "<u8").tobytes()), "00000.docs is damaged"),
    (_replace("00000.docs", b""), "00000.docs has 0 bytes"),
    (lambda folder: (folder / "train" / "00000.docs").unlink(), "00000.docs cannot be read"),
    (lambda folder: (folder / "train" / "00000.tokens").unlink(), "holds no token files"),
    (lambda folder: (folder / "train" / "00000.json").unlink(), "00000.tokens has no JSON"),
    (lambda folder: (folder / "dataset.json").write_text("x"), "dataset.json cannot be read"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[words for _, words in DAMAGE])
def test_damaged_files_are_refused_by_name(folder: Path, damage, words: str) -> None:
    damage(folder)
    with pytest.raises(ConfigError, match=words.replace("(", "\\(")):
        TokenSamples(folder, 4)


def test_a_missing_shard_is_noticed(tmp_path: Path) -> None:
    folder = write(tmp_path / "data", ["aaaa", "bbbb", "cccc"], shard_tokens=5)
    for suffix in (".json", ".tokens", ".docs"):
        (folder / "train" / f"00001{suffix}").unlink()
    with pytest.raises(ConfigError, match=r"has 2 shards, dataset\.json says 3"):
        TokenFolder.open(folder)


def test_what_sizes_do_not_show_is_found_by_reading(folder: Path) -> None:
    path = folder / "train" / "00000.tokens"
    data = bytearray(path.read_bytes())
    data[2] ^= 1
    path.write_bytes(data)
    assert len(TokenSamples(folder, 4)) == 3  # sizes are right, so opening does not read it all
    with pytest.raises(ConfigError, match=r"00000\.tokens is damaged: its hash"):
        describe(folder, verify=True)
    data[3] = 0xFF
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="outside the vocabulary of 257"):
        TokenSamples(folder, 4)[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [("absent", "no file or folder"), ("notes.txt", "deepwell data prepare"), ("alone.tokens", "unfinished")],
)
def test_other_files_are_no_token_files(tmp_path: Path, name: str, words: str) -> None:
    if name != "absent":
        (tmp_path / name).write_bytes(b"ab")
    with pytest.raises(ConfigError, match=words):
        TokenFolder.open(tmp_path / name)
    with pytest.raises(ConfigError, match="is empty"):
        TokenFolder.open([])


def test_sets_with_different_tokenizers_do_not_mix(tmp_path: Path) -> None:
    one = write(tmp_path / "one", ["ab"])
    other = write(tmp_path / "other", ["ab"], tokenizer=Vocabulary(300))
    with pytest.raises(ConfigError, match="has vocab 300"):
        TokenFolder.open([one, other])


def test_one_file_is_named_in_three_ways(folder: Path) -> None:
    for name in ("00000", "00000.json", "00000.tokens"):
        assert len(TokenFolder.open(folder / "train" / name)) == 13
    assert Shard(folder / "train" / "00000.json").info.documents == 3
