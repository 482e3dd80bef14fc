"""Recipes: every file in recipes/ reads, the ones for clusters plan and fit, and mistakes are named."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from deepwell.cli import app
from deepwell.errors import ConfigError
from deepwell.train.data import TextDocuments, prepare_tokens
from deepwell.train.recipe import Recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
FILES = sorted(RECIPES.glob("*.toml"))


def test_every_recipe_reads_and_says_how_it_is_run() -> None:
    assert {path.stem for path in FILES} >= {"tiny", "llama-100m", "llama-8b", "llama-70b-b200", "qwen3-moe-b200"}
    for path in FILES:
        recipe = Recipe.read(path)
        assert recipe.settings.steps > 0 and recipe.model_config()["model_type"]
        assert f"deepwell train recipes/{path.name}" in path.read_text()
        if "B200" in path.read_text():
            assert "not run" in path.read_text()


@pytest.mark.parametrize("name", ["llama-70b-b200", "qwen3-moe-b200"])
def test_cluster_recipes_plan_and_fit(name: str) -> None:
    found = CliRunner().invoke(app, ["train", str(RECIPES / f"{name}.toml"), "--dry-run", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["fits"] is True


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["train.stps=3"], "did you mean steps"),
        (["trian.steps=3"], "did you mean train"),
        (["model.nam=1"], "did you mean name"),
        (["steps=3"], "section.key=value"),
        (["train.lr=fast"], "lr"),
        (["model.name=llama3-8b"], "one of name"),
        (["train=3"], "section.key=value"),
        (["model.layers=x"], "layers is 'x'; it takes a value of type int"),
        (["run.elastic=no"], "elastic is 'no'"),
        (["data.train=5"], "train is 5; it takes a value of type str or list"),
        (["data.tokenizer=x"], "has no tokenizer; it takes train, eval, document_mask"),
        (["run.tensorboard=true"], "has no tensorboard"),
    ],
)
def test_mistakes_are_named(overrides: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        recipe = Recipe.read(RECIPES / "tiny.toml", overrides)
        recipe.settings  # noqa: B018 - reads [train]
        recipe.model_config()


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("model.set.hiden_size=64", "did you mean hidden_size"),
        ("model.set.hidden_size=63", "63"),
        ("run.device=tpu", "device is 'tpu'"),
        ("run.device=cuda", "device is 'cuda'"),
    ],
)
def test_models_and_devices_that_are_none(override: str, word: str) -> None:
    if override == "run.device=cuda" and torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(ConfigError, match=word):
        Recipe.read(RECIPES / "tiny.toml", [override]).trainer()


def test_data_of_a_recipe_is_read_as_it_says(tmp_path: Path) -> None:
    for name in ("a", "b"):
        prepare_tokens(TextDocuments(["some words. " * 40] * 9), tmp_path / name, tokenizer="bytes")
    folders = json.dumps([str(tmp_path / "a" / "train"), str(tmp_path / "b" / "train")])
    given = [f"data.train={folders}", f'run.dir="{tmp_path / "run"}"', "train.steps=1", "train.warmup=0"]
    for changes, mask in (([], True), (["data.document_mask=false"], False)):
        trainer = Recipe.read(RECIPES / "tiny.toml", [*given, "precision.recipe=bf16", *changes]).trainer(quiet=True)
        assert ("position_ids" in trainer.loader.batch(0, range(2))) is mask
        assert trainer.loader.epoch_samples == 2 * 9 * 481 // 64


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("[train\nsteps = 3")
    for path in (bad, tmp_path / "none.toml"):
        found = CliRunner().invoke(app, ["train", str(path)])
        assert found.exit_code == 2 and path.name in found.output and "Traceback" not in found.output


def test_overrides_reach_their_section() -> None:
    recipe = Recipe.read(RECIPES / "tiny.toml", ["train.steps=7", "data.train=some/where", "model.set.vocab_size=300"])
    assert recipe.settings.steps == 7 and recipe.section("data")["train"] == "some/where"
    assert recipe.model_config()["vocab_size"] == 300


def test_a_run_that_is_shortened_warms_up_for_all_of_it_and_says_so(tmp_path: Path) -> None:
    where = f'run.dir="{tmp_path / "run"}"'
    trainer = Recipe.read(RECIPES / "tiny.toml", ["train.steps=2", where, "precision.recipe=bf16"]).trainer(quiet=True)
    assert (trainer.settings.steps, trainer.settings.warmup) == (2, 2)
    assert "train.warmup is 2, not 5: train.steps=2 leaves no more steps" in trainer.notes
    assert Recipe.read(RECIPES / "tiny.toml", ["train.steps=5"]).notes == ()
    # What is asked for by name stays wrong, and so does a recipe that cannot be right by itself.
    path = tmp_path / "wrong.toml"
    path.write_text((RECIPES / "tiny.toml").read_text().replace("warmup = 5", "warmup = 61"))
    asked = Recipe.read(RECIPES / "tiny.toml", ["train.steps=2", "train.warmup=5"])
    for recipe in (asked, Recipe.read(path), Recipe.read(path, ["train.steps=2"])):
        with pytest.raises(ConfigError, match="warmup is"):
            recipe.settings  # noqa: B018 - reads [train]


@pytest.mark.parametrize(
    ("arguments", "word"), [(["--nproc", "two"], "--nproc"), (["--nproc", "2", "--nnodes", "2"], "--rdzv")]
)
def test_a_wrong_start_is_an_error(arguments: list[str], word: str) -> None:
    found = CliRunner().invoke(app, ["train", str(RECIPES / "tiny.toml"), *arguments])
    assert found.exit_code == 2 and word in found.output


def test_a_run_that_gives_up_ends_with_1(tmp_path: Path) -> None:
    folder = tmp_path / 'a "quoted" folder'
    folder.mkdir()
    starts = [json.dumps({"generation": number, "step": 0, "world": 1, "t": 1.0}) for number in range(7)]
    (folder / "starts.jsonl").write_text("\n".join(starts))
    found = CliRunner().invoke(app, ["train", str(RECIPES / "tiny.toml"), "--run-dir", str(folder), "--json"])
    assert found.exit_code == 1 and "brought no new checkpoint" in found.output
    assert json.loads((folder / "events.jsonl").read_text().splitlines()[-1])["exit"] == 1


def test_launch_files_are_sound() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((RECIPES / "launch" / "pytorchjob.yaml").read_text())
    assert job["kind"] == "PyTorchJob"
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", str(RECIPES / "launch" / "slurm.sbatch")], check=True)
