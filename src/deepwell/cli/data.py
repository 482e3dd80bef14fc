"""`deepwell data`: make token files from text, and say what is in them."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from deepwell.cli.options import option

app = typer.Typer(help="Make token files from text, and look into them.", no_args_is_help=True)


@app.command("prepare")
def prepare_command(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT...", help=".txt .md .py .jsonl .json .parquet, folders, or stdlib.")
    ],
    out: Annotated[Path, option("Folder for the token files; call again to go on.", "--out", "-o")],
    tokenizer: Annotated[str, option("A tokenizer's JSON file or folder, or bytes (257 tokens).")] = "bytes",
    eos: Annotated[str | None, option("The token that ends a document, where it is none of the usual.")] = None,
    text_key: Annotated[str, option("Where JSON and Parquet keep the text.")] = "text",
    seq_len: Annotated[int | None, option("Remembered as the default length of windows; tokens are the same.")] = None,
    val_fraction: Annotated[float, option("Share of the documents for FOLDER/val, chosen by content.")] = 0.0,
    shard_tokens: Annotated[int, option("Tokens of a file, about.")] = 1 << 28,
    restart: Annotated[bool, option("Remove what an earlier call wrote there.", "--restart")] = False,
    as_json: Annotated[bool, option("Print JSON only.", "--json")] = False,
) -> None:
    """Turn text into token files for training. Interrupted? The same command goes on, and writes the same bytes."""
    from deepwell.hardware.progress import bar
    from deepwell.train.data.documents import FileDocuments
    from deepwell.train.data.prepare import prepare_tokens

    started = time.perf_counter()
    documents = FileDocuments(inputs, text_key)
    with bar("tokenizing", documents.total) as advance:
        found = prepare_tokens(
            documents,
            out,
            tokenizer=tokenizer,
            eos=eos,
            seq_len=seq_len,
            val_fraction=val_fraction,
            shard_tokens=shard_tokens,
            restart=restart,
            advance=advance,
        )
    seconds = time.perf_counter() - started
    if as_json:
        typer.echo(json.dumps({**found, "seconds": round(seconds, 3)}, indent=2))
        return
    before = f", {found['resumed']:,} by an earlier call" if found["resumed"] else ""
    empty = f", {found['empty']:,} of them empty" if found["empty"] else ""
    if found["resumed"] or found["wrote"]:
        typer.echo(f"{found['read']:,} documents{empty}{before}; {seconds:.1f} s")
    else:
        typer.echo("everything was there already")
    _print(found)


@app.command("info")
def info_command(
    folder: Annotated[Path, typer.Argument(help="A folder of token files, or one file.")],
    verify: Annotated[
        bool, option("Read every token and compare hashes; status 2 where one differs.", "--verify")
    ] = False,
    as_json: Annotated[bool, option("Print JSON only.", "--json")] = False,
) -> None:
    """Show how many tokens and documents there are, their vocabulary, tokenizer and hash."""
    from deepwell.train.data.token_files import describe

    found = describe(folder, verify=verify)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        _print(found)
        if verify:
            typer.echo("every token was read; hashes agree")


def _print(found: dict[str, Any]) -> None:
    for name, split in found["splits"].items():
        windows = f", {split['tokens'] // split['seq_len']:,} windows of {split['seq_len']}" if split["seq_len"] else ""
        typer.echo(
            f"{name:6} {split['tokens']:,} tokens, {split['documents']:,} documents, {split['shards']} shards"
            f"{windows}\n"
            f"{'':6} vocabulary {split['vocab']:,} ({split['tokenizer']}, {split['dtype']}), end token {split['eos']}, "
            f"sha256 {split['sha256'][:16]}\n{'':6} {split['path']}"
        )
