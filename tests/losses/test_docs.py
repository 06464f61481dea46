"""The pages in ``docs/methods/`` and the type stub agree with the code."""

import re
from pathlib import Path

import pytest

from openclip_ext.losses.options import OPTIONS, PARTS
from openclip_ext.losses.registry import list_losses
from tests.losses.option_tables import ELSEWHERE, PAGES, STUB, losses_on, stub, updated

TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_options_are_up_to_date(page: Path) -> None:
    assert TEXTS[page.name] == updated(TEXTS[page.name]), "run: python -m tests.losses.option_tables"


def test_the_type_stub_is_up_to_date() -> None:
    assert STUB.read_text(encoding="utf-8") == stub(), "run: python -m tests.losses.option_tables"


def test_the_type_stub_accepts_the_parts_of_an_own_method() -> None:
    for part in PARTS:
        assert re.search(rf"    {part}: Literal\[.*\] \| str \| None = ", STUB.read_text(encoding="utf-8"))


def test_every_loss_has_its_options_on_one_page() -> None:
    documented = [loss for text in TEXTS.values() for loss in losses_on(text)]
    assert sorted(loss for loss in documented if " " not in loss) == sorted(list_losses())
    assert "sogclr views=2" in documented


def test_every_option_is_on_a_page() -> None:
    rows = "\n".join(TEXTS.values())
    assert [name for name in OPTIONS if f"| `{name}`" not in rows] == list(ELSEWHERE)


def test_the_index_names_every_loss_and_links_every_page() -> None:
    index = TEXTS["README.md"]
    assert [name for name in list_losses() if f"`{name}`" not in index] == []
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", index))
    assert linked == set(TEXTS) - {"README.md"}
