"""The documents: examples run, links lead somewhere, every public name has its place."""

import re
from pathlib import Path

import pytest

import linattn
import linattn.layers
from linattn.layers.family import layers, table

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize(("page", "least"), [("api.md", 12), ("transformers.md", 1)])
def test_every_example_of_a_page_runs(page, least):
    text = (ROOT / "docs" / page).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= least
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


def test_the_family_page_is_what_the_layers_say():
    assert (ROOT / "docs" / "family.md").read_text() == table() + "\n"


def test_the_family_meets_the_criteria_as_published():
    """Chou et al. 2024, table 1: the groups that linattn has a layer for."""
    published = {
        "SoftmaxAttention": (False, True, True, False),
        "Retention": (True, False, False, False),
        "LightningAttention": (True, False, False, False),
        "GatedLinearAttention": (True, True, True, False),
        "Mamba2": (True, True, True, False),
        "LinearAttention": (True, False, True, False),
        "MetaLA": (True, True, True, True),
    }
    for name, criteria in published.items():
        f = layers()[name]
        found = (f.linear_cost, f.dynamic_memory, f.static_approximation, f.fewest_parameters)
        assert found == criteria, name
    mixers = {
        n for n in linattn.layers.__all__ if hasattr(getattr(linattn.layers, n), "state_size")
    }
    assert mixers - {"ShortConvolution", "GatedConvolution"} == set(layers())
