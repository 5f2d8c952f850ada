"""Builder of the documentation site: pages of `docs/`, and reference pages generated from the source.

`make docs` runs it. It imports neither torch nor transformers: API and argument pages are read with `ast`.
"""
