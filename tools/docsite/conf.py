"""Sphinx configuration. The build adds `-W`, so a broken link or reference is an error."""

project = "Forgather"
author = "The Forgather developers"
copyright = "The Forgather developers"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_title = "Forgather"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
# Blocks without a language show commands and output.
highlight_language = "text"
pygments_dark_style = "github-dark"
# Quotes in help texts belong to values.
smartquotes = False
myst_heading_anchors = 4
myst_enable_extensions = ["deflist", "fieldlist"]
add_module_names = False
toc_object_entries = False
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
