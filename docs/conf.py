"""How the documentation is built; `make docs` runs it with every warning as an error."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

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
    "fpverify": ["fpverify", "--help"],
    "fpspec": ["fpspec", "--help"],
    "matrix": ["fpspec", "matrix"],
}

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {"fixed_sidebar": True, "page_width": "1100px"}
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
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


def setup(app: Sphinx) -> None:
    """Register the directive and role for clauses, then copy the specification."""
    app.add_object_type("clause", "clause", objname="clause of the specification")
    app.connect("missing-reference", find_by_last_part)
    copy_spec()
    write_outputs()
