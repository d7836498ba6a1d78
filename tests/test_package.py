"""The package: what importing it costs, what it exports, how its modules depend on each other."""

import ast
import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import linattn
import linattn.layers

SOURCE = Path(linattn.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def modules_after(code):
    """Return the modules that a fresh interpreter has loaded after torch and `code`."""
    program = f"import sys, torch; old = set(sys.modules); {code}; print(*set(sys.modules) - old)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_e8_importing_loads_nothing_beside_torch():
    """No Triton, no model library, nothing of the command line; backends only when called."""
    new = modules_after("import linattn")
    roots = {name.split(".")[0] for name in new}
    foreign = "triton transformers typer rich matplotlib numpy psutil safetensors hypothesis"
    assert not roots & set(foreign.split())
    ours = {name for name in new if name.startswith("linattn.")}
    for part in ("chunked", "reference", "layers", "models", "tasks", "cli", "bench", "testing"):
        assert not any(name.split(".")[1] == part for name in ours), part


def test_a_call_loads_its_backend_and_no_other():
    call = (
        "import linattn; x = torch.ones(1, 2, 1, 1); "
        "linattn.linear_attention(x, x, x, backend={!r})"
    )
    for used, other in (("chunked", "reference"), ("reference", "chunked")):
        new = modules_after(call.format(used))
        assert f"linattn.{used}.additive" in new
        assert f"linattn.{other}" not in new


def test_backends_say_whether_and_why():
    found = linattn.backends()
    assert list(found) == ["reference", "chunked", "cpu", "triton"]
    for name, backend in found.items():
        assert backend.name == name
        assert isinstance(backend.available, bool)
        assert backend.reason
    assert found["reference"].available
    assert found["chunked"].available


def test_the_version_is_that_of_the_distribution():
    assert linattn.__version__ == importlib.metadata.version("linattn")


@pytest.mark.parametrize("module", [linattn, linattn.layers])
def test_everything_exported_exists_and_is_documented(module):
    for name in module.__all__:
        public = getattr(module, name)
        if name != "__version__":
            assert inspect.getdoc(public), name


def public_functions():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                yield path.relative_to(SOURCE).as_posix(), node


def test_e3_no_public_function_takes_any_keyword():
    """A misspelt option is an error everywhere."""
    inside = {"testing.py"}  # the wrapper of torch.empty takes what torch.empty takes
    # transformers calls these with what it likes; tests/models shows that they check the names.
    models = {"forward", "prepare_inputs_for_generation", "preset"}
    for path, node in public_functions():
        checked = "models" in Path(path).parts and node.name in models
        # `refuse_others` checks the names; what stands in for a forward hands them on.
        checked |= path.startswith("integrations/")
        checked |= path == "evaluate/trial.py" and node.name.startswith("on_")  # of a callback
        if not node.name.startswith("_") and path not in inside and not checked:
            assert node.args.kwarg is None, f"{path}: {node.name}"


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_backends_import_neither_each_other_nor_the_reference():
    families = ("chunked", "reference", "cpu", "triton")
    for family in families:
        for path in (SOURCE / family).glob("*.py"):
            for other in (*families, "layers", "models", "tasks", "cli"):
                if other != family:
                    found = [m for m in imports_of(path) if m.startswith(f"linattn.{other}")]
                    assert not found, f"{path.name}: {found}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(SOURCE).as_posix())
def test_files_are_short_and_plain_ascii(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 300
    assert text.isascii()


def test_the_package_is_marked_as_typed():
    assert (SOURCE / "py.typed").is_file()


def test_the_signature_of_the_operator():
    """Case E5: the design's names, order and defaults."""
    parameters = inspect.signature(linattn.linear_attention).parameters
    names = "q k v log_decay beta causal scale bias normalize mask initial_state return_state"
    assert list(parameters) == [*names.split(), "out_state", "cu_seqlens", "backend"]
    assert parameters["normalize"].default is False
    positional = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["q", "k", "v", "log_decay", "beta"]
