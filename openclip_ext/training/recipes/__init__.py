"""Recipes: the papers' settings as code, one file per data set.

``--recipe cc3m --loss neuclip`` puts :meth:`Recipe.argv` in front of the user's own flags, which therefore win.
``python -m openclip_ext.training.recipes`` lists them.
"""

import difflib
from dataclasses import replace

from openclip_ext.training.recipes import cc3m, cc12m, coco, dfn1b, dfn14m, dfn192m, laion400m
from openclip_ext.training.recipes.schema import Recipe, Result

__all__ = ["Recipe", "Result", "get", "losses", "names"]

_RECIPES: dict[str, dict[str, Recipe]] = {
    recipes[0].dataset: {recipe.loss: recipe for recipe in recipes}
    for recipes in (
        coco.RECIPES,
        cc3m.RECIPES,
        cc12m.RECIPES,
        dfn14m.RECIPES,
        dfn192m.RECIPES,
        dfn1b.RECIPES,
        laion400m.RECIPES,
    )
}

# Losses with two names.
_ALIASES = {"fastclip-v3": "fastclip"}


def names() -> list[str]:
    """The data sets that have recipes, from small to large."""
    return list(_RECIPES)


def losses(name: str) -> list[str]:
    """The losses with published settings on data set ``name``.

    Raises:
        ValueError: no recipe has this name.
    """
    if name not in _RECIPES:
        raise ValueError(f"unknown recipe {name!r}{_did_you_mean(name, names())}; there are: {', '.join(names())}")
    return list(_RECIPES[name])


def get(name: str, loss: str) -> Recipe:
    """The recipe of ``loss`` on data set ``name``.

    Raises:
        ValueError: no recipe has this name, or it has no published settings for the loss.
    """
    known = losses(name)
    canonical = _ALIASES.get(loss, loss)
    if canonical not in known:
        raise ValueError(
            f"recipe {name} has no published settings for the loss {loss!r}{_did_you_mean(loss, known)}; it has them for: "
            f"{', '.join(known)}. Leave out --recipe to train with the defaults"
        )
    return replace(_RECIPES[name][canonical], loss=loss)


def _did_you_mean(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
