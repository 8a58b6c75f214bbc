"""How Sphinx builds these pages: ``make docs``. Warnings are errors, and nothing is fetched from a network."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import poprisk  # noqa: E402

project = "poprisk"
author = "the poprisk authors"
copyright = author
version = release = poprisk.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "myst_parser",
    "sphinx_gallery.gen_gallery",
    "sphinx_copybutton",
    "mathml",
    "poprisk_docs",
]
exclude_patterns = ["_build", "gallery"]
html_theme = "furo"
html_title = f"poprisk {release}"
html_static_path = ["_static"]
html_css_files = ["poprisk.css"]
html_copy_source = False
html_show_sourcelink = False
templates_path = []

# Pages in Markdown.
myst_enable_extensions = ["deflist", "colon_fence", "attrs_block"]
myst_heading_anchors = 4

# The reference: what the code says, as it says it.
autoclass_content = "class"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 96
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
add_module_names = False
toc_object_entries_show_parents = "hide"

# A reference to a name of ours must resolve; other packages' manuals are not looked up.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|numpy|np|scipy|jax|optax|collections|typing|jaxtyping|pathlib|transformers|lightning)\..*"),
    (r"py:class", r"Tensor|os\.PathLike|enum\.Enum|abc\.ABC|LightningModule"),
    (r"py:class", r"GateName|Centering|Signal|Granularity"),  # optax's signatures are text
    (r"py:func", r"functools\.partial"),
    (r"py:.*", r"poprisk_lab\..*"),  # the reference is that of the library
]

sphinx_gallery_conf = {
    "examples_dirs": [str(HERE / "gallery")],
    "gallery_dirs": ["auto_gallery"],
    "filename_pattern": r"\.py$",
    "within_subsection_order": "FileNameSortKey",
    "download_all_examples": False,
    "show_memory": False,
    "write_computation_times": False,  # that page would load scripts from elsewhere
    "show_signature": False,
    "reset_modules": ("matplotlib",),
    "remove_config_comments": True,
    "plot_gallery": True,
}
