"""Recipes: every file in recipes/ reads, the ones for clusters plan and fit, and mistakes are named."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepwell.cli import app
from deepwell.errors import ConfigError
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
    ],
)
def test_mistakes_are_named(overrides: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        recipe = Recipe.read(RECIPES / "tiny.toml", overrides)
        recipe.settings  # noqa: B018 - reads [train]
        recipe.model_config()


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


@pytest.mark.parametrize(
    ("arguments", "word"), [(["--nproc", "two"], "--nproc"), (["--nproc", "2", "--nnodes", "2"], "--rdzv")]
)
def test_a_wrong_start_is_an_error(arguments: list[str], word: str) -> None:
    found = CliRunner().invoke(app, ["train", str(RECIPES / "tiny.toml"), *arguments])
    assert found.exit_code == 2 and word in found.output


def test_launch_files_are_sound() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((RECIPES / "launch" / "pytorchjob.yaml").read_text())
    assert job["kind"] == "PyTorchJob"
    container = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert {"name": "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "value": "1"} in container["env"]
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", str(RECIPES / "launch" / "slurm.sbatch")], check=True)
