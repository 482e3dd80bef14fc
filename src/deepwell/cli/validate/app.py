"""`deepwell validate`: checks that answer yes or no with measured numbers.

Each command ends with status 1 where the answer is no. Imports stay inside the commands: the command line must not load
torch to print its help.
"""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from deepwell.cli.options import option
from deepwell.cli.validate.faults import faults_command
from deepwell.cli.validate.planner import planner_command
from deepwell.errors import ConfigError

app = typer.Typer(
    help="Check claims by measuring: accuracy of a policy, predictions of the planner, kills survived.",
    no_args_is_help=True,
)


app.command("planner")(planner_command)
app.command("faults")(faults_command)


@app.command("parity")
def parity_command(
    arms: Annotated[str, option("What to compare with bf16: fp8, fp8_head, mxfp8_emulated, policy.json, ...")] = "fp8",
    seeds: Annotated[str, option("One pair of runs for each, e.g. 0,1,2.")] = "0",
    tokens: Annotated[float, option("Training tokens of a run.")] = 50e6,
    model: Annotated[str, option("768-12l (135M parameters), 384-6l or tiny; moe-384-6l, moe-128-4l.")] = "768-12l",
    batch: Annotated[int, option("Sequences of a step.")] = 32,
    seq_len: Annotated[int, option("Tokens of a sequence.")] = 1024,
    lr: Annotated[float, option("Highest learning rate.")] = 3e-4,
    warmup: Annotated[float, option("Share of the steps in which the rate rises.")] = 0.1,
    evals: Annotated[int, option("How often the held-out loss is measured during a run.")] = 5,
    eval_tokens: Annotated[int, option("Held-out tokens at the end.")] = 1 << 20,
    bound: Annotated[float, option("Largest mean gap that passes, 0.0025 = 0.25%.")] = 0.0025,
    out: Annotated[Path, option("Folder of results and checkpoints; call again to go on.")] = Path("out/parity"),
    budget: Annotated[float | None, option("Seconds after which to save and stop; call again to go on.")] = None,
    checkpoint_every: Annotated[int, option("Steps between checkpoints.")] = 500,
    log_every: Annotated[int, option("Steps between two losses of the curve.")] = 50,
    text: Annotated[list[Path] | None, option("Folder of text instead of the installed sources; repeatable.")] = None,
    megabytes: Annotated[float, option("Text to use at most.")] = 190.0,
    vocab: Annotated[int, option("Size of the BPE that is trained on the text.")] = 32768,
    tokenizer: Annotated[Path | None, option("A tokenizer's JSON from an earlier call, instead of training.")] = None,
    prepare: Annotated[bool, option("Only make the text's tokens, and say where they are kept.", "--prepare")] = False,
    cuda_graphs: Annotated[
        bool | None, option("Replay recorded steps; on a GPU by default.", "--cuda-graphs/--no-cuda-graphs")
    ] = None,
    device: Annotated[str | None, option("cuda or cpu; the GPU where there is one.")] = None,
    as_json: Annotated[bool, option("Print JSON only.", "--json")] = False,
) -> None:
    """Train the same model in bf16 and in other precisions and compare the held-out loss; status 1 where a gap fails.

    The results are DIR/parity.json and DIR/parity.png. Unfinished runs keep a checkpoint there and go on at the next
    call with the same options, also after a kill.
    """
    started = time.perf_counter()

    def say(line: str) -> None:
        typer.echo(line, err=as_json)

    def prepared() -> Any:
        from deepwell.bench.corpus import make_corpus

        before = time.perf_counter()
        corpus = make_corpus(text, megabytes=megabytes, vocab=vocab, tokenizer=tokenizer)
        say(f"{corpus}; {time.perf_counter() - before:.0f} s")
        say(f"tokenizer: {corpus.tokenizer}")
        return corpus

    if prepare:
        corpus = prepared()
        if as_json:
            typer.echo(json.dumps({**corpus.to_dict(), "tokenizer": corpus.tokenizer}))
        return

    from deepwell.bench.devices import pick_device
    from deepwell.bench.parity.compare import PairSetup, Results, WantedRuns, run_plan
    from deepwell.bench.parity.run import Pace

    # Everything that can be wrong with the options and the folder comes before the text, which can take minutes.
    for name, value in (("--tokens", tokens), ("--bound", bound)):
        if not math.isfinite(value):
            raise ConfigError(f"{name} is {value}; give a number")
    if budget is not None and not budget > 0:
        raise ConfigError(f"--budget is {budget:g}; give seconds above 0, or leave it out")
    setup = PairSetup(
        model=model,
        tokens=int(tokens),
        batch=batch,
        seq_len=seq_len,
        lr=lr,
        warmup=warmup,
        evals=evals,
        eval_tokens=eval_tokens,
    )
    where = pick_device(device)
    plan = WantedRuns(
        arms=_arms(arms, say),
        seeds=_seeds(seeds),
        setup=setup,
        device=where,
        cuda_graphs=where == "cuda" and cuda_graphs is not False,
    )
    deadline = None if budget is None else started + budget
    pace = Pace(log_every=log_every, checkpoint_every=checkpoint_every, deadline=deadline)
    Results.open(out)
    corpus = prepared()
    took = time.perf_counter() - started
    results, left = run_plan(plan, corpus, out, pace, say)
    if left and budget is not None and took > budget:
        # An error: every call reads the text, so calling again and again might never begin a run.
        raise ConfigError(
            f"--budget is {budget:g} s, but starting and preparing the text took {took:.1f} s, so no run was begun; "
            f"its tokens are kept in {Path(corpus.train).parent}: call again, and give a larger --budget if reading "
            "the text alone takes as long"
        )
    _show(results, left, bound, as_json, say)


def _arms(text: str, say: Callable[[str], None]) -> tuple[Any, ...]:
    """The variants to compare with the baseline, which runs anyway."""
    from deepwell.bench.parity.run import BASELINE
    from deepwell.bench.variants import Variant, parse_variants

    named = parse_variants(text)
    arms = tuple(arm for arm in named if arm != Variant.parse(BASELINE))
    if not arms:
        raise ConfigError(f"--arms is {text!r}; name what to compare with {BASELINE}, which always runs: e.g. fp8")
    if len(arms) < len(named):
        say(f"--arms: {BASELINE} is the baseline and always runs; it need not be named")
    return arms


def _seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(item) for item in text.split(",") if item.strip())
    except ValueError:
        seeds = ()
    if not seeds or not all(0 <= seed < 2**32 for seed in seeds):
        raise ConfigError(f"--seeds is {text!r}; give whole numbers from 0 to 2^32 - 1 with commas between them")
    return seeds


def _show(results: Any, left: int, bound: float, as_json: bool, say: Callable[[str], None]) -> None:
    """Verdicts, files and the status: 1 where an arm fails."""
    from deepwell.bench.parity.plot import plot

    try:
        picture = str(plot(results, results.path.with_suffix(".png")))
    except ConfigError as error:
        picture = f"no picture: {error}"
    verdicts = results.verdicts(bound)
    for verdict in verdicts:
        say(str(verdict))
    say(f"results: {results.path}; {picture}")
    if left:
        say(f"{left} runs are not finished: call again with the same options to go on")
    if as_json:
        typer.echo(json.dumps({**results.to_dict(), "verdicts": [v.to_dict() for v in verdicts], "left": left}))
    if any(verdict.answer == "fail" for verdict in verdicts):
        raise typer.Exit(1)
