"""Text becomes tokens the same way every time: each content once, some held out, the cache keyed by content."""

import json
from pathlib import Path

import numpy as np
import pytest

from deepwell.bench.corpus import END, Corpus, _load_tokenizer, make_corpus, python_roots, read_text
from deepwell.errors import ConfigError

tokenizers = pytest.importorskip("tokenizers")


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="")


def source(number: int) -> str:
    return f"def function_{number}():\n    return {number}\n" * 12


def test_a_content_counts_once_whatever_its_name_and_spacing(tmp_path: Path) -> None:
    # Vendored packages repeat files, often with other line ends.
    for number in range(200):
        write(tmp_path, f"a/{number}.py", source(number))
        write(tmp_path, f"b/copy_{number}.py", source(number).replace("\n", "\r\n"))
    text = read_text([tmp_path], 1e9)
    assert len(text.train) + len(text.held) == 200
    assert 0 < len(text.held) < 20


def test_the_split_depends_on_contents_alone(tmp_path: Path) -> None:
    # Another machine keeps the same files elsewhere and under other names; held-out files must stay held out.
    for number in range(200):
        write(tmp_path, f"one/{number}.py", source(number))
        write(tmp_path, f"two/deep/{199 - number}_x.py", source(number))
    one, two = read_text([tmp_path / "one"], 1e9), read_text([tmp_path / "two"], 1e9)
    assert one == two
    assert not set(one.train) & set(one.held)


def test_python_comes_before_other_sources_when_the_limit_is_short(tmp_path: Path) -> None:
    for number in range(150):
        write(tmp_path, f"{number}.py", source(number))
        write(tmp_path, f"{number}.h", "// header\n" + source(number) * 2)
    limited = read_text([tmp_path], 40_000)
    assert not any("// header" in text for text in limited.train + limited.held)
    everything = read_text([tmp_path], 1e9)
    assert sum("// header" in text for text in everything.train + everything.held) == 150


def test_tokens_say_what_the_text_says_with_an_end_after_each_file(corpus: Corpus, text_folder: Path) -> None:
    bpe = tokenizers.Tokenizer.from_file(corpus.tokenizer)
    tokens = np.load(corpus.train)
    assert tokens.dtype == np.uint16 and len(tokens) == corpus.num_train
    ends = np.flatnonzero(tokens == bpe.token_to_id(END))
    text = read_text([text_folder], 1e9)
    assert len(ends) == len(text.train)
    assert bpe.decode(tokens[: ends[0]].tolist()) == text.train[0]


def test_a_given_tokenizer_is_used_and_the_same_text_gives_the_same_fingerprint(
    corpus: Corpus, text_folder: Path, tmp_path: Path
) -> None:
    again = make_corpus([text_folder], tokenizer=Path(corpus.tokenizer), folder=tmp_path)
    assert again.fingerprint == corpus.fingerprint
    assert np.array_equal(np.load(again.held), np.load(corpus.held))
    assert again.to_dict() == corpus.to_dict()
    assert str(tmp_path) not in str(again.to_dict())


BYTES = {END: 0} | {letter: 1 + n for n, letter in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}


def as_tokenizer(vocab: dict[str, int], merges: object, kind: str = "ByteLevel") -> str:
    return json.dumps({"pre_tokenizer": {"type": kind}, "model": {"vocab": vocab, "merges": merges}})


@pytest.mark.parametrize("merges", [[["a", "b"], ["ab", "c"]], ["a b", "ab c"]])
def test_merges_are_read_as_old_and_new_packages_write_them(
    text_folder: Path, tmp_path: Path, merges: list[object]
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(as_tokenizer(BYTES | {"ab": 257, "abc": 258}, merges), encoding="utf-8")
    assert make_corpus([text_folder], tokenizer=path, folder=tmp_path).vocab == 259


def test_a_tokenizer_comes_back_from_its_file_as_it_was_trained(corpus: Corpus) -> None:
    # Read by hand, not by the package: every byte of what would be written again must be the same.
    assert _load_tokenizer(Path(corpus.tokenizer)).to_str() == Path(corpus.tokenizer).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "no json",
        "[1]",
        '{"model": {"vocab": {"a": 0}}}',
        '{"model": {"vocab": {"<|end|>": 0}}}',
        as_tokenizer({END: 0}, []),
        as_tokenizer({**BYTES, END: 5}, []),
        as_tokenizer({**BYTES, "ab": 2**40}, []),
        as_tokenizer(BYTES, [["a", "b"]]),
        as_tokenizer(BYTES, [["a"]]),
        as_tokenizer(BYTES, 1),
        as_tokenizer(BYTES, [], "Whitespace"),
    ],
)
def test_a_file_that_is_no_tokenizer_of_ours_is_refused(text_folder: Path, tmp_path: Path, content: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--tokenizer: .*wrong\.json"):
        make_corpus([text_folder], tokenizer=path, folder=tmp_path)


def test_a_folder_that_is_not_there_is_an_error_also_beside_one_that_is(text_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--text: there is no folder .*nowhere"):
        make_corpus([text_folder, tmp_path / "nowhere"], vocab=320, folder=tmp_path)


@pytest.mark.parametrize(("name", "content"), [("short.py", "x = 1"), ("picture.png", "x" * 500)])
def test_a_folder_without_text_is_an_error_also_beside_one_with_it(
    text_folder: Path, tmp_path: Path, name: str, content: str
) -> None:
    write(tmp_path / "bare", name, content)
    with pytest.raises(ConfigError, match=r"--text: no file under .*bare is 200 bytes to 1 MB of \.py"):
        make_corpus([text_folder, tmp_path / "bare"], vocab=320, folder=tmp_path)


@pytest.mark.parametrize("damage", ["cut", "empty", "other"])
@pytest.mark.parametrize("part", ["train", "held", "tokenizer"])
def test_what_is_damaged_in_the_cache_is_made_again(
    text_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, part: str, damage: str
) -> None:
    corpus = make_corpus([text_folder], vocab=320, folder=tmp_path)
    path = Path(getattr(corpus, part))
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "other": b"[\x80]"}[damage])
    assert make_corpus([text_folder], vocab=320, folder=tmp_path) == corpus
    assert path.read_bytes() == whole and path.name in caplog.text


def test_tokens_of_another_kind_in_the_cache_are_made_again(text_folder: Path, tmp_path: Path) -> None:
    corpus = make_corpus([text_folder], vocab=320, folder=tmp_path)
    np.save(corpus.held, np.zeros((3, 3), dtype=np.float32))
    assert make_corpus([text_folder], vocab=320, folder=tmp_path) == corpus


def test_too_little_text_and_a_wrong_vocabulary_are_errors(tmp_path: Path) -> None:
    write(tmp_path, "one.py", source(1))
    with pytest.raises(ConfigError, match="too few"):
        make_corpus([tmp_path], folder=tmp_path / "tokens")
    with pytest.raises(ConfigError, match="vocab is 70000"):
        make_corpus([tmp_path], vocab=70_000, folder=tmp_path / "tokens")


def test_every_machine_has_python_sources() -> None:
    assert any((root / "os.py").is_file() for root in python_roots())
