"""List the recipes: ``python -m openclip_ext.training.recipes [DATASET [LOSS]]``."""

import argparse

from openclip_ext.cli import command_line
from openclip_ext.training import recipes


def main(argv: list[str] | None = None) -> None:
    """Print the names of all recipes, the names of one data set's recipes, or one recipe with its source and results."""
    parser = command_line.Parser(prog="openclip_ext.training.recipes", description=__doc__)
    parser.add_argument("dataset", nargs="?", help=f"one of: {', '.join(recipes.names())}")
    parser.add_argument("loss", nargs="?", help="a loss with a recipe for DATASET")
    parser.add_argument(
        "--share-batch",
        nargs=argparse.REMAINDER,
        help="print the --batch-size for the recipe's global batch; expects a number of GPUs, then the flags of a run",
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.share_batch is not None:
            print(batch_flag(int(arguments.share_batch[0]), arguments.share_batch[1:]))
        elif arguments.loss is not None:
            print(recipes.get(arguments.dataset, arguments.loss))
        else:
            for name in recipes.names() if arguments.dataset is None else [arguments.dataset]:
                print(f"{name}: {', '.join(recipes.losses(name))}")
    except ValueError as error:
        parser.error(str(error))


def batch_flag(gpus: int, training_flags: list[str]) -> str:
    """Return ``--batch-size=N`` for the recipe in a run's flags. If the flags contain no recipe, return an empty text."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--recipe")
    parser.add_argument("--loss")
    parser.add_argument("--siglip", action="store_true")
    given, _ = parser.parse_known_args(training_flags)
    if given.recipe is None:
        return ""
    loss = given.loss or ("siglip" if given.siglip else "openclip")
    global_batch = recipes.get(given.recipe, loss).global_batch
    if global_batch % gpus:
        raise ValueError(f"global batch {global_batch} is not divisible by {gpus} GPUs: use a different number of GPUs")
    return f"--batch-size={global_batch // gpus}"


if __name__ == "__main__":
    command_line.run(main)
