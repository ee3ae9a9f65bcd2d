"""How the documentation is built; `make docs` runs it with every warning as an error."""

import ast
import dataclasses
import inspect
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from docutils.nodes import TextElement
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

from fpformat import __version__

HERE = Path(__file__).resolve().parent
SPEC = HERE.parent / "spec"

project = "fpformat"
copyright = "the authors of fpformat"
version = release = __version__

# Files that are made from what a command prints.
OUTPUTS = {
    "fpconvert": ["fpconvert", "--help"],
    "fpinspect": ["fpinspect", "--help"],
    "fpinspect-gc": ["fpinspect", "gc", "--help"],
    "fpverify": ["fpverify", "--help"],
    "matrix": [sys.executable, str(HERE.parent / "tools" / "fpspec"), "matrix"],
}

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {"fixed_sidebar": True, "page_width": "1100px"}
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# Bases are shown where they tell something: pages ask for them at exceptions.
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False

# Types of other projects; their inventories would have to be fetched.
nitpick_ignore_regex = [
    ("py:.*", r"(collections|os|pathlib|types|typing|numpy|np|torch)\..*"),
    (
        "py:class",
        r"(Any|Callable|Iterable|Iterator|Mapping|PathLike|Path|Sequence|Tensor|optional)",
    ),
]


def copy_spec() -> None:
    """Bring the specification below the documents; sphinx reads nothing above them."""
    target = HERE / "reference" / "spec"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(SPEC, target)


def write_outputs() -> None:
    """Let the commands say themselves what their pages show."""
    target = HERE / "reference" / "generated"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    environment = {**os.environ, "COLUMNS": "88"}
    for name, (command, *words) in OUTPUTS.items():
        done = subprocess.run(
            [Path(sys.executable).parent / command, *words],
            check=True,
            capture_output=True,
            text=True,
            env=environment,
        )
        (target / f"{name}.txt").write_text(done.stdout, encoding="utf-8")


def find_by_last_part(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: TextElement
) -> TextElement | None:
    """Resolve a name that a docstring uses without the module that it was imported from."""
    if node["refdomain"] != "py":
        return None
    domain = env.domains.python_domain
    last = "." + node["reftarget"].rpartition(".")[2]
    places = {
        (entry.docname, entry.node_id)
        for name, entry in domain.objects.items()
        if name.endswith(last)
    }
    if len(places) != 1:
        return None
    docname, node_id = places.pop()
    return make_refnode(app.builder, node["refdoc"], docname, node_id, content)


def short_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returned: str
) -> tuple[str, None] | None:
    """Return the signature of a record as its source spells it; a protocol is not called at all.

    Otherwise aliases of types would be written out, over many lines, and defaults be ``<factory>``.
    """
    if what != "class":
        return None
    if getattr(obj, "_is_protocol", False):
        return "", None
    if not dataclasses.is_dataclass(obj):
        return None
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(obj))).body
    assert isinstance(tree, ast.ClassDef)
    written = {
        statement.target.id: statement
        for statement in tree.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    fields = [field for field in dataclasses.fields(obj) if field.init]
    words = [_argument(field, written[field.name]) for field in fields]
    if fields and fields[0].kw_only:
        words.insert(0, "*")
    return f"({', '.join(words)})", None


def _argument(field: "dataclasses.Field[Any]", written: ast.AnnAssign) -> str:
    kind = written.annotation
    text = kind.value if isinstance(kind, ast.Constant) else ast.unparse(kind)
    if field.default_factory is not dataclasses.MISSING:
        return f"{field.name}: {text} = ..."
    if field.default is dataclasses.MISSING:
        return f"{field.name}: {text}"
    return f"{field.name}: {text} = {field.default!r}"


def setup(app: Sphinx) -> None:
    """Register the directive and role for clauses, then copy the specification."""
    app.add_object_type("clause", "clause", objname="clause of the specification")
    app.connect("missing-reference", find_by_last_part)
    app.connect("autodoc-process-signature", short_signature)
    copy_spec()
    write_outputs()
