"""Make a token dataset from any text.

uv run prepare_datasets.py my-texts datasets/me/my-texts
uv run prepare_datasets.py HuggingFaceFW/fineweb datasets/me/fineweb --include "sample/10BT/*" --delete-after
"""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from harness.common.errors import (
    EXIT,
    UserError,
    interrupt_on_stopping_signals,
    printable,
    tell_how_to_continue,
)
from harness.common.messages import abbreviated, counted, document_count, is_hub_name, is_unicode
from harness.common.options import Command, FiniteNumber

GO_WITH = {  # option: the other options that can be combined with it
    "verify": {"push_to_hub", "public"},
    "describe": set(),
    "from_bin": {"token_dtype", "tokenizer", "description", "overwrite", "restart", "push_to_hub", "public"},
}
FRACTION = FiniteNumber(min=0, max=1, max_open=True)
SMALLEST_VOCABULARY = 257  # every byte, and end-of-text
FEW_DOCUMENTS = 10  # with fewer documents, a split's loss measures those documents rather than the whole text


@click.command(cls=Command, context_settings={"max_content_width": 120})
@click.argument("inputs", metavar="[INPUT]...", nargs=-1)
@click.argument("output_dir", metavar="[OUTPUT_DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--text-column", default="text", show_default=True, help="Column (parquet) or key (JSON lines) of the text."
)
@click.option(
    "--document-separator",
    help=r"Text between the documents of a text file, e.g. '\n\n\n'; without it, each text file is one document.",
)
@click.option("--replace-invalid", is_flag=True, help="Read what is not UTF-8 as U+FFFD instead of failing.")
@click.option(
    "--include",
    multiple=True,
    metavar="GLOB",
    help="Read only these files of a Hub dataset; can be given several times.",
)
@click.option("--revision", help="Branch, tag or commit of a Hub dataset.  [default: newest commit]")
@click.option(
    "--delete-after",
    is_flag=True,
    help="Download the files of a Hub dataset to a folder beside OUTPUT_DIR, and delete each after reading.",
)
@click.option("--tokenizer", help="gpt2, another encoding of tiktoken, or a tokenizer.json.  [default: gpt2]")
@click.option(
    "--train-tokenizer",
    type=click.IntRange(SMALLEST_VOCABULARY, 2**20),
    metavar="SIZE",
    help="Train a byte-level BPE tokenizer with SIZE tokens.",
)
@click.option(
    "--special-token",
    multiple=True,
    metavar="NAME",
    help="With --train-tokenizer: a further special token, such as <|user|>; can be given several times.",
)
@click.option("--validation-fraction", type=FRACTION, default=0.01, show_default=True, help="Share of the text.")
@click.option("--test-fraction", type=FRACTION, default=0.0, show_default=True, help="Share of the text.")
@click.option(
    "--split-order",
    type=click.Choice(["seeded", "given"]),
    default="seeded",
    show_default=True,
    help="seeded: hold out documents drawn with a fixed seed, or the end of the text if a split would get no document. "
    "given: hold out the last documents. Fractions are then shares of the documents, or of the tokens if a split would "
    "get no document.",
)
@click.option(
    "--shuffle-seed",
    type=click.IntRange(0, 2**63 - 1),
    help="Shuffle all training documents with this seed. If the end of the text or the last documents are held out "
    "(see --split-order), shuffle the whole text before the split, or nothing without a seed. Otherwise, without a "
    "seed, shuffle a text of up to 16,384 documents, and part of a longer one.",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="DATASET:SPLIT",
    help="Leave out documents of which more than half occurs in this split of a dataset; can be given several times.",
)
@click.option("--max-documents", type=click.IntRange(1), metavar="N", help="Stop when the dataset has N documents.")
@click.option("--max-tokens", type=click.IntRange(1), metavar="N", help="Stop at the end of the document with token N.")
@click.option("--description", default="", help="Description of the dataset, for meta.json and the dataset card.")
@click.option(
    "--workers",
    type=click.IntRange(1, 1024),
    help="Number of processes; does not change the dataset.  [default: all cores, or fewer for a small text]",
)
@click.option("--overwrite", is_flag=True, help="Replace OUTPUT_DIR when the new dataset is complete.")
@click.option("--restart", is_flag=True, help="Begin again instead of continuing interrupted work.")
@click.option(
    "--from-bin",
    is_flag=True,
    help="INPUT holds token shards, .bin or .npy, of nanoGPT, build-nanogpt, llm.c or modded-nanogpt.",
)
@click.option(
    "--token-dtype",
    type=click.Choice(["uint16", "uint32"]),
    help="With --from-bin: dtype of tokens in files without a header.  [default: uint16]",
)
@click.option("--verify", metavar="DIR", type=click.Path(path_type=Path), help="Check a dataset folder; make nothing.")
@click.option("--describe", metavar="DIR", type=click.Path(path_type=Path), help="Print what is in a dataset folder.")
@click.option(
    "--push-to-hub",
    metavar="OWNER/NAME",
    help="Upload the new dataset or, with --verify, the dataset in DIR. A new repository is private without --public.",
)
@click.option("--public", is_flag=True, help="With --push-to-hub: make a new repository public.")
def main(inputs: tuple[str, ...], output_dir: Path | None, **options: Any) -> None:
    """Make a token dataset from INPUT in OUTPUT_DIR (DATASETS_DIR/owner/name).

    INPUT is a folder, a file or a glob, or several of these, or the name of a dataset on the Hugging Face Hub. Files
    are read in the order of their names. In a folder, files of parquet, JSON lines (.jsonl, .ndjson) and text (.txt,
    .text) are read, the last two also with .gz or .zst. Hidden files are not. Any other file is read if it is given by
    name or glob: .json as JSON lines, the rest as text. To resume an interrupted preparation, run the same command
    again.

    Each document ends with the token <|endoftext|>, or with <|end_of_text|> if --tokenizer is a tokenizer.json that has
    only that one. Inside a document, the token's name is ordinary text.
    """
    interrupt_on_stopping_signals()
    tell_how_to_continue("--restart" if options["restart"] else None)
    check_options(inputs, output_dir, options)
    if output_dir:
        for line in make(inputs, output_dir, options):
            click.echo(line)
    from harness.data.dataset import Dataset

    folder = output_dir or options["verify"] or options["describe"]
    if not output_dir:
        from harness.data.report import describe, verify

        for line in (verify if options["verify"] else describe)(Dataset.at(folder)):
            click.echo(line)
    if options["push_to_hub"]:
        from harness.data.hub import push_command, upload_dataset

        name, public = options["push_to_hub"], options["public"]
        EXIT.again = f"run: {push_command(folder, name, public=public)}"
        click.echo(f"Uploaded to {upload_dataset(Dataset.at(folder), name, public=public)}")


def check_options(inputs: Sequence[str], output_dir: Path | None, options: dict[str, Any]) -> None:
    """Raise UserError if arguments and options cannot be combined, or have wrong values."""
    for value in (*inputs, str(output_dir), *map(str, options.values())):
        if not is_unicode(value):
            raise UserError(f"{printable(value)}: not valid UTF-8; rename the file, or give other text")
    if options["push_to_hub"] and not is_hub_name(options["push_to_hub"]):
        raise UserError(f"--push-to-hub {options['push_to_hub']}: give owner/name")
    makes = bool(inputs or output_dir)
    looking = [key for key in ("verify", "describe") if options[key]]
    if len(looking) + makes != 1 or (makes and not (inputs and output_dir)):
        raise UserError("give INPUT and OUTPUT_DIR, or --verify DIR, or --describe DIR (see --help)")
    if options["public"] and not options["push_to_hub"]:
        raise UserError("--public belongs with --push-to-hub OWNER/NAME")
    mode = looking[0] if looking else "from_bin" if options["from_bin"] else ""
    source = click.get_current_context().get_parameter_source
    names = {key: f"--{key.replace('_', '-')}" for key in options}  # as the user types them
    given = [key for key in options if source(key) is ParameterSource.COMMANDLINE]
    if strange := [names[key] for key in given if mode and key not in {mode, *GO_WITH[mode]}]:
        raise UserError(f"{abbreviated(strange)}: cannot be combined with {names[mode]}")
    if options["token_dtype"] and not options["from_bin"]:
        raise UserError("--token-dtype belongs with --from-bin")
    if options["tokenizer"] and options["train_tokenizer"]:
        raise UserError("--tokenizer and --train-tokenizer: give at most one of them")
    if options["special_token"]:
        check_special_tokens(options["special_token"], options["train_tokenizer"])
    if options["validation_fraction"] + options["test_fraction"] >= 1:
        raise UserError(
            "--validation-fraction and --test-fraction leave nothing for training; their sum must be below 1"
        )


def check_special_tokens(names: Sequence[str], vocab_size: int | None) -> None:
    """Raise UserError if one of `names` is repeated, empty or end-of-text, if `vocab_size` is None (no new tokenizer is
    trained), or if a new tokenizer with `vocab_size` tokens has no room for them."""
    from harness.data.tokenizers import END_OF_TEXT

    if vocab_size is None:
        raise UserError("--special-token belongs with --train-tokenizer")
    if "" in names or len({END_OF_TEXT, *names}) <= len(names):
        raise UserError(
            f"--special-token: give each name once, no empty one, and not {END_OF_TEXT}, which is always there"
        )
    if vocab_size < (least := SMALLEST_VOCABULARY + len(names)):
        raise UserError(f"--train-tokenizer {vocab_size}: must be at least {least} with --special-token")


def make(inputs: Sequence[str], output_dir: Path, options: dict[str, Any]) -> Iterator[str]:
    """Make the dataset, or resume its interrupted preparation. Yield lines for the user: its splits and vocabulary,
    warnings, and the commands that train on it."""
    from harness.data.preparation.command import make_dataset

    if ".." in output_dir.parts:  # resolve the path, so that its last two parts are owner/name
        output_dir = Path(os.path.realpath(output_dir))
    held_out = None
    if options["exclude"]:
        from harness.data.overlap import HeldOutSplits

        datasets = output_dir.absolute().parent.parent if len(output_dir.parts) > 1 else Path("datasets")
        held_out = HeldOutSplits(options["exclude"], datasets)
    splits, vocab_size = make_dataset(inputs, output_dir, options, held_out)
    for split in splits:
        tokens, documents = counted(split.tokens, "token"), document_count(split.documents)
        yield f"{split.name}: {tokens}, {documents}, {counted(split.bytes, 'byte')} of text"
    train = next((split for split in splits if split.name == "train"), splits[0])
    longest, trained = train.longest_document, train.tokens  # 0 if unknown
    if longest > trained / 10:
        hint = "" if options["document_separator"] else "; --document-separator cuts text files into documents"
        yield (
            f'one document has {longest / trained:.0%} of the train split\'s tokens; without "shuffle": true in '
            f"train.json, training reads it in one stretch, and meanwhile the loss depends on it alone{hint}"
        )
    for split in splits if not options["from_bin"] else ():
        asked, share = options.get(f"{split.name}_fraction"), split.bytes / sum(each.bytes for each in splits)
        # If `split_order` is "given", the fraction asked for is one of the documents, not of the bytes.
        is_off = options["split_order"] != "given" and asked and abs(share - asked) > asked / 10
        if asked and (split.documents < FEW_DOCUMENTS or is_off):
            yield (
                f"{split.name} is {document_count(split.documents)} with {share:.2%} of the text ({asked:.2%} asked "
                f"for); its loss may not represent the whole text; --{split.name}-fraction changes the share"
            )
    yield f"{output_dir} is complete, with a vocabulary of {vocab_size:,} tokens"
    yield "Next:"
    yield from (f"  {line}" for line in next_steps(output_dir))


def next_steps(folder: Path) -> Iterator[str]:
    """Yield the commands that train a model like the quickstart's on the dataset in `folder`, a path ending in
    OWNER/NAME, or a bare NAME. For a bare NAME, the first command moves the folder to datasets/me/."""
    if len(folder.parts) == 1:
        place = Path("datasets", "me", folder)
        yield f"mkdir -p {place.parent} && mv {folder} {place}"
        folder = place
    datasets_dir = shlex.quote(str(folder.parent.parent))
    elsewhere = f" --datasets-dir {datasets_dir}" if datasets_dir != "datasets" else ""
    names = itertools.chain(("mine", folder.name), (f"{folder.name}-{number}" for number in itertools.count(2)))
    name = next(name for name in names if not Path("runs", name).exists())
    yield f"uv run derive_run.py quickstart {name} --set dataset={'/'.join(folder.absolute().parts[-2:])}{elsewhere}"
    yield f"uv run ddp_train.py {name} {datasets_dir}"


if __name__ == "__main__":
    main()
