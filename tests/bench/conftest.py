"""What the tests of bench share: a small text to train on, and graphs that do not outlive a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deepwell.bench.corpus import Corpus, make_corpus

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 files of made-up sources; enough that some of them are held out."""
    folder = tmp_path_factory.mktemp("text")
    words = "alpha beta gamma delta value = return def class for in range ( ) [ ] : + - * /".split()
    for number in range(300):
        lines = [" ".join(words[(number * 7 + line * 3 + i * i) % len(words)] for i in range(9)) for line in range(30)]
        (folder / f"file{number}.py").write_text(f"# {number}\n" + "\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def corpus(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return make_corpus([text_folder], vocab=320, folder=tmp_path_factory.mktemp("tokens"))
