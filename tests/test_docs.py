"""The documents: examples run, links lead somewhere, every public name has its place."""

import re
from pathlib import Path

import pytest

import linattn
import linattn.layers

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_every_example_of_the_api_page_runs():
    text = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 12
    names = {}
    for block in blocks:
        exec(block, names)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_documents_name_are_there(path):
    for name in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w/]+\.\w+)`", path.read_text()):
        assert (ROOT / name).exists(), name


def test_every_public_name_is_on_the_api_page():
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    listed = {name for heading in headings for name in heading.split(", ")}
    for module in (linattn, linattn.layers):
        for name in module.__all__:
            assert name == "__version__" or f"{module.__name__}.{name}" in listed
