"""What the documentation must mention: every public name, every setting, every text of an error."""

import importlib.util
import re
from types import ModuleType

import pytest
from error_texts import Text, all_texts
from pages import DOCS

import hvdtorch.torch as hvd
from hvdtorch.config import SETTINGS
from hvdtorch.horovod_variables import VARIABLES
from hvdtorch.launch.horovodrun_flags import REFUSED, UNUSED


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    """The hook that fills in the tables."""
    spec = importlib.util.spec_from_file_location("tables", DOCS / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(text: str) -> str:
    """Without Markdown's marks, on one line."""
    return re.sub(r"\s+", " ", text.replace("`", ""))


def test_every_public_name_is_in_the_api_reference() -> None:
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    generated = set(re.findall(r"^::: hvdtorch\.\w+\.(\w+)$", pages, re.MULTILINE))
    by_hand = set(re.findall(r"^\| `hvd\.(\w+)` \| \d \|", pages, re.MULTILINE))
    assert set(hvd.__all__) - generated - by_hand - {"__version__"} == set()
    assert "`hvdtorch.__version__`" in pages
    for name in by_hand:
        value = re.search(rf"^\| `hvd\.{name}` \| (\d) \|", pages, re.MULTILINE)
        assert value is not None and int(value.group(1)) == getattr(hvd, name)


def test_every_setting_is_on_its_page(tables: ModuleType) -> None:
    page = tables.on_page_markdown((DOCS / "settings.md").read_text())
    assert "<!-- table" not in page
    for row in SETTINGS:
        assert page.count(f"### `{row.variable}`") == 1
        for name in (*row.aliases, *row.flags, *row.switches):
            assert f"`{name}" in page, name
    for name in (*(v.name for v in VARIABLES), *(u.flag for u in UNUSED), *REFUSED):
        assert f"| `{name}` |" in page, name


def test_a_table_that_does_not_exist_breaks_the_build(tables: ModuleType) -> None:
    with pytest.raises(KeyError, match="nonsense"):
        tables.on_page_markdown("a\n<!-- table: nonsense -->\n")


@pytest.fixture(scope="module")
def explained(tables: ModuleType) -> str:
    """The pages on which texts are explained."""
    pages = [*sorted((DOCS / "troubleshooting").glob("*.md")), DOCS / "settings.md"]
    return plain(" ".join(tables.on_page_markdown(page.read_text()) for page in pages))


def test_every_error_text_is_explained(explained: str) -> None:
    texts = all_texts()
    assert len(texts) > 150
    missing = [
        f"{text.where}: {text.text}" for text in texts if plain(text.longest) not in explained
    ]
    assert missing == [], "to be added to docs/troubleshooting:\n" + "\n".join(missing)


def test_no_text_is_explained_that_does_not_exist() -> None:
    known = [plain(text.longest) for text in all_texts(words=2)]
    unknown = [
        f"{page.name}:{number}: {line}"
        for page in sorted((DOCS / "troubleshooting").glob("*.md"))
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if re.fullmatch("`.*`", line) and not any(text in plain(line) for text in known)
    ]
    assert unknown == []


def test_texts_are_found_in_both_languages() -> None:
    """So that the test above cannot pass by finding nothing."""
    found = {text.longest for text in all_texts()}
    assert "hvdtorch is not initialized: call hvd.init() first" in found
    assert "cannot be scaled: leave the prescale and postscale factors at 1" in found
    assert Text("x", "a ... longer part: ...").longest == "longer part"
