"""List the recipes: ``python -m openclip_ext.training.recipes [DATASET [LOSS]]``."""

import argparse

from openclip_ext.training import recipes


def main(argv: list[str] | None = None) -> None:
    """Print the names of all recipes, those of one data set, or one recipe with its source and expected results."""
    parser = argparse.ArgumentParser(prog="openclip_ext.training.recipes", description=__doc__)
    parser.add_argument("dataset", nargs="?", help=f"one of: {', '.join(recipes.names())}")
    parser.add_argument("loss", nargs="?", help="a loss with published settings on it")
    arguments = parser.parse_args(argv)
    try:
        if arguments.loss is not None:
            print(recipes.get(arguments.dataset, arguments.loss))
            return
        for name in recipes.names() if arguments.dataset is None else [arguments.dataset]:
            print(f"{name}: {', '.join(recipes.losses(name))}")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
